// The vector kernels for CPUs with AVX-512.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,bmi2,prefer-vector-width=512")
#define PYDML_ISA avx512
#include "cpu/kernels.h"
#endif
