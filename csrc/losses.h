// The list of policies: X(name that the ops use, class). Everything that must know them all goes through it.
#pragma once
#include "losses/arcface.h"
#include "losses/bin_lifted.h"
#include "losses/binomial.h"
#include "losses/dro_binomial.h"
#include "losses/dro_margin.h"
#include "losses/exponential.h"
#include "losses/hinge.h"
#include "losses/lifted.h"
#include "losses/mean.h"

#define PYDML_POLICIES(X)     \
  X(exponential, Exponential) \
  X(binomial, Binomial)       \
  X(bin_lifted, BinLifted)    \
  X(hinge, Hinge)             \
  X(mean, Mean)               \
  X(lifted, Lifted)           \
  X(arcface, ArcFace)         \
  X(dro_margin, DROMargin)    \
  X(dro_binomial, DROBinomial)
