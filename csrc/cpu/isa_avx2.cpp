// The vector kernels for CPUs with AVX2 and FMA.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,bmi2")
#define PYDML_ISA avx2
#include "cpu/kernels.h"
#endif
