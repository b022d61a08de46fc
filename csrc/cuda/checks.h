// Refusals of what kernels would read or write beyond an array: the ops can be called by anybody, with tensors that do
// not fit together. On torch's stable ABI, so apart from csrc/cpu/checks.h. Entries are looked at where the host has
// them, in the emulated library; nobody waits for a GPU.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

namespace pydml {
namespace {  // hidden, as the tensors of the stable ABI are

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using Shape = std::initializer_list<int64_t>;

template <class T>
constexpr ScalarType type_of = ScalarType::Undefined;
template <>
inline constexpr ScalarType type_of<float> = ScalarType::Float;
template <>
inline constexpr ScalarType type_of<double> = ScalarType::Double;
template <>
inline constexpr ScalarType type_of<int> = ScalarType::Int;
template <>
inline constexpr ScalarType type_of<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType type_of<unsigned long long> = ScalarType::Long;  // counters, which torch has signed

template <class... Words>
[[noreturn]] void refuse(const std::string& name, const Words&... words) {
  std::ostringstream text;
  text << name << ": got ";
  ((text << words), ...);
  throw std::runtime_error(text.str());
}

template <class Sizes>
std::string shown(const Sizes& sizes) {
  std::ostringstream text;
  const char* before = "[";
  for (const int64_t size : sizes) text << before << size, before = ", ";
  return text.str() + (sizes.size() ? "]" : "[]");
}

inline std::string device_of(const Tensor& t) {
  return t.is_cpu() ? "cpu" : (t.is_cuda() ? "cuda:" : "device ") + std::to_string(int(t.get_device_index()));
}

inline void check_number(const std::string& name, int64_t got, int64_t least, int64_t below) {
  if (got < least || got >= below) refuse(name, got, ", wanted a number in [", least, ", ", below, ")");
}

// A list of tensors may have holes.
inline void check_given(const std::string& name, const Tensor& t) {
  if (!t.defined()) refuse(name, "none, wanted a tensor");
}

inline void check_type(const std::string& name, const Tensor& t, ScalarType wanted) {
  if (t.scalar_type() != wanted) refuse(name, "dtype ", t.scalar_type(), ", wanted ", wanted);
}

inline void check_dims(const std::string& name, const Tensor& t, int64_t wanted) {
  check_given(name, t);
  if (t.dim() != wanted) refuse(name, "shape ", shown(t.sizes()), ", wanted ", wanted, " dimensions");
}

inline void check_shape(const std::string& name, const Tensor& t, Shape wanted) {
  const auto sizes = t.sizes();
  if (!std::equal(sizes.begin(), sizes.end(), wanted.begin(), wanted.end()))
    refuse(name, "shape ", shown(sizes), ", wanted ", shown(wanted));
  if (!t.is_contiguous()) refuse(name, "a tensor in pieces, wanted a contiguous one");
}

// The first n entries are places in [least, below).
template <class T>
void check_places(const std::string& name, const Tensor& t, int64_t n, int64_t least, int64_t below) {
  if (!t.is_cpu()) return;
  const T *const begin = static_cast<const T*>(t.const_data_ptr()), *const end = begin + n;
  const T* const bad = std::find_if(begin, end, [&](T v) { return v < least || v >= below; });
  if (bad != end) refuse(name, *bad, ", wanted entries in [", least, ", ", below, ")");
}

// Arrays of one call, all of them on one device and in one piece: checked, then handed out as pointers.
class Arrays {
 public:
  Arrays(const std::string& name, const Tensor& first) : first_(first) { check_given(name, first); }

  const Tensor& first() const { return first_; }
  void check_device(const std::string& name, const Tensor& t) const {
    check_given(name, t);
    if (t.device() != first_.device()) refuse(name, "device ", device_of(t), ", wanted ", device_of(first_));
  }
  template <class T>
  const T* in(const std::string& name, const Tensor& t, Shape wanted) const {
    check<T>(name, t, wanted);
    return static_cast<const T*>(t.const_data_ptr());
  }
  template <class T>
  const T* in(const std::string& name, const OptionalTensor& t, Shape wanted) const {
    return t ? in<T>(name, *t, wanted) : nullptr;
  }
  template <class T>
  T* out(const std::string& name, const Tensor& t, Shape wanted) const {
    check<T>(name, t, wanted);
    return static_cast<T*>(t.mutable_data_ptr());
  }

 private:
  template <class T>
  void check(const std::string& name, const Tensor& t, Shape wanted) const {
    check_device(name, t);
    check_type(name, t, type_of<T>);
    check_shape(name, t, wanted);
  }
  Tensor first_;
};

}  // namespace
}  // namespace pydml
