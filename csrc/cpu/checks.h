// Refusals of what would read beyond an array: the ops can be called by anybody, with tensors that do not fit together.
#pragma once
#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>

namespace pydml {

inline void check_shape(const char* name, const at::Tensor& t, at::IntArrayRef wanted) {
  TORCH_CHECK(t.sizes() == wanted, name, ": got shape ", t.sizes(), ", wanted ", wanted);
}

// A vector of places in [least, below), in one piece.
inline at::Tensor check_places(const char* name, const at::Tensor& t, int64_t least, int64_t below) {
  TORCH_CHECK(t.dim() == 1, name, ": got shape ", t.sizes(), ", wanted 1 dimension");
  TORCH_CHECK(t.scalar_type() == at::kLong, name, ": got dtype ", t.scalar_type(), ", wanted Long");
  const at::Tensor places = t.contiguous();
  const int64_t *const begin = places.const_data_ptr<int64_t>(), *const end = begin + places.numel();
  const int64_t* const bad = std::find_if(begin, end, [&](int64_t v) { return v < least || v >= below; });
  TORCH_CHECK(bad == end, name, ": got ", bad == end ? 0 : *bad, ", wanted entries in [", least, ", ", below, ")");
  return places;
}

// What a forward pass left behind, to be read as numbers of `bytes` bytes.
inline void check_kept(const char* name, const at::Tensor& t, at::ScalarType type, size_t bytes) {
  TORCH_CHECK(t.scalar_type() == type, name, ": got dtype ", t.scalar_type(), ", wanted ", type);
  TORCH_CHECK(t.is_contiguous() && reinterpret_cast<uintptr_t>(t.const_data_ptr()) % bytes == 0, name,
              ": got a tensor in pieces or out of line, wanted the one that the forward pass returned");
}

}  // namespace pydml
