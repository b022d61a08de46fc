// The vector kernels for any CPU: what the compiler makes of them with no extra instruction set.
#define PYDML_ISA portable
#include "cpu/kernels.h"
