// What the launchers take: plain pointers and numbers. No torch and no CUDA header, so that the binding and the kernels
// both include it.
#pragma once
#include <stdint.h>

namespace pydml {

// How dot products are formed: fp32 on ordinary cores, or on tensor cores by the format of their operands.
enum class Math : int { fp32, tf32, bf16, fp16 };
enum class View : int { dot, cosine, euclidean, squared };

constexpr int kTile = 64;       // edge of a tile
constexpr int kHalves = 2;      // threads that share a row of it
constexpr int kRowBytes = 128;  // rows are stored in whole slabs of so many
constexpr int kChunk = 32;      // positives of a row that a block holds at a time

// Rows or columns of the similarity matrix as `prepare` leaves them: sorted by label, gathered, padded to whole tiles.
// `pool` neighbours are one item (a class of SoftTriple); items never cross a tile.
struct Rows {
  const void* x;         // [places, slabs·128 bytes]
  const float* scale;    // [places] x̂ = scale·x; 0 where there is only padding
  const float* size;     // [places] ‖x̂‖²
  const float* norm;     // [places] ‖z‖
  const int64_t* index;  // [places] row of z, -1 for padding
  const int* self;       // [n] the item of the other side that each of them itself is, -1: none; or null
  int n, pool;           // items; places of each
};

// The matrix as one block of threads sees it: a block owns 64 rows of `own` and walks over `other`.
struct Matrix {
  Rows own, other;
  const int* range;    // [own.n, 2] items of `other` of the same class
  const int* trouble;  // not 0 where an embedding was not finite
  int slabs, d;        // 128-byte slabs of a row, and how many columns are real
  int math, view, symmetric;
  int upper;   // of a symmetric matrix only pairs (i, j) of places i < j are looked at
  int splits;  // blocks that share the walk of one tile of rows
  float sharpness;
};

}  // namespace pydml
