// The Python module pydml._C: how it was built and what this CPU offers. The torch ops register themselves in
// csrc/cpu/*.cpp, so that importing the module is all it takes to have them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/version.h>

#include <string>
#include <vector>

#include "losses.h"

namespace pydml {
const char* isa_name();
}

namespace py = pybind11;

namespace {

using Names = std::vector<std::string>;

#if defined(__clang__)
constexpr const char* kCompiler = "clang " __clang_version__;
#else
constexpr const char* kCompiler = "g++ " __VERSION__;
#endif

// Policies of csrc/losses that the kernels were compiled for.
Names loss_names() {
#define PYDML_NAME(name, Policy) #name,
  return {PYDML_POLICIES(PYDML_NAME)};
#undef PYDML_NAME
}

// Instruction sets that the kernels were compiled for; the best one that the CPU has is chosen at run time.
Names isa_variants() {
#if defined(__x86_64__)
  return {"portable", "avx2", "avx512"};
#else
  return {"portable"};
#endif
}

// What the CPU has of the instruction sets that kernels may ask for.
Names cpu_features() {
  Names found;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) found.push_back("avx2");
  if (__builtin_cpu_supports("fma")) found.push_back("fma");
  if (__builtin_cpu_supports("avx512f")) found.push_back("avx512f");
  if (__builtin_cpu_supports("avx512bw")) found.push_back("avx512bw");
  if (__builtin_cpu_supports("avx512dq")) found.push_back("avx512dq");
  if (__builtin_cpu_supports("avx512vl")) found.push_back("avx512vl");
#endif
  return found;
}

// No date in it: the same sources give the same library.
py::dict build_info() {
  py::dict info;
  info["compiler"] = kCompiler;
  info["standard"] = "C++" + std::to_string(__cplusplus / 100 % 100);
  info["flags"] = PYDML_FLAGS;
  info["torch"] = TORCH_VERSION;
  info["isa"] = isa_variants();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "Compiled part of pydml.";
  m.def("build_info", &build_info, "Compiler, standard, flags, torch version and instruction sets of this build.");
  m.def("cpu_features", &cpu_features, "Vector instruction sets of this CPU.");
  m.def("losses", &loss_names, "Policies that the kernels were compiled for.");
  m.def("isa", &pydml::isa_name, "The instruction set that the kernels use here (PYDML_ISA asks for another).");
}
