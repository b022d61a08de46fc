// What the lanes of a warp do together, tensor-core instructions included: lane layouts as in the PTX ISA's figures.
#include "emulator.h"

namespace emulator {

namespace {

constexpr int kLanes = 32;

// `run` as a plain function on typed lanes; a lane outside the mask is not there.
template <class Lane, class Run>
void together(const char* what, unsigned mask, Lane& mine, int line, Run) {
  static_assert(std::is_empty_v<Run>, "the work sees the lanes and nothing else");
  collective(what, mask, &mine, line, [](void* const* lanes, unsigned mask) {
    Lane* typed[kLanes];
    for (int l = 0; l < kLanes; ++l) typed[l] = mask >> l & 1 ? static_cast<Lane*>(lanes[l]) : nullptr;
    Run()(typed);
  });
}

struct Vote {
  uint64_t value;
  unsigned result;
};

// Both operands of a tensor-core instruction as numbers: a by rows, b by rows, d by rows.
struct Product {
  Format format;
  float* d;
  const unsigned* a;
  unsigned b[2];
};

float number(Format format, unsigned bits) {
  if (format == Format::bf16) return __bfloat162float({uint16_t(bits)});
  if (format == Format::fp16) return __half2float({uint16_t(bits)});
  return bits_float(bits & 0xffffe000u);  // the hardware does not look at the 13 lowest bits
}

}  // namespace

void meet(unsigned mask, int line) {
  char nothing = 0;
  collective("__syncwarp", mask, &nothing, line, [](void* const*, unsigned) {});
}

uint64_t shuffle(Shuffle kind, unsigned mask, uint64_t value, int from, int width, int line) {
  if (width < 1 || width > kLanes || (width & (width - 1))) fail("shuffle: the width is not a power of 2", line);
  struct Lane {
    Shuffle kind;
    uint64_t value;
    int from, width;
    uint64_t got;
  } mine = {kind, value, from, width, 0};
  together("__shfl_sync", mask, mine, line, [](Lane* const* lanes) {
    for (int l = 0; l < kLanes; ++l) {
      if (!lanes[l]) continue;
      Lane& lane = *lanes[l];
      const int first = l & ~(lane.width - 1), end = first + lane.width;
      int source = l;
      if (lane.kind == Shuffle::index) source = first + (lane.from & (lane.width - 1));
      if (lane.kind == Shuffle::exclusive_or && (l ^ lane.from) < end) source = l ^ lane.from;
      if (lane.kind == Shuffle::down && l + lane.from < end) source = l + lane.from;
      if (lane.kind == Shuffle::up && l - lane.from >= first) source = l - lane.from;
      lane.got = lanes[source] ? lanes[source]->value : ~uint64_t(0);  // undefined on a GPU
    }
  });
  return mine.got;
}

unsigned ballot(unsigned mask, bool vote, int line) {
  Vote mine = {vote, 0};
  together("__ballot_sync", mask, mine, line, [](Vote* const* lanes) {
    unsigned result = 0;
    for (int l = 0; l < kLanes; ++l)
      if (lanes[l] && lanes[l]->value) result |= 1u << l;
    for (int l = 0; l < kLanes; ++l)
      if (lanes[l]) lanes[l]->result = result;
  });
  return mine.result;
}

unsigned match(unsigned mask, uint64_t value, int line) {
  Vote mine = {value, 0};
  together("__match_any_sync", mask, mine, line, [](Vote* const* lanes) {
    for (int l = 0; l < kLanes; ++l)
      for (int other = 0; other < kLanes; ++other)
        if (lanes[l] && lanes[other] && lanes[l]->value == lanes[other]->value) lanes[l]->result |= 1u << other;
  });
  return mine.result;
}

void mma(Format format, float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, int line) {
  Product mine = {format, d, a, {b0, b1}};
  together("mma.sync", ~0u, mine, line, [](Product* const* lanes) {
    const Format format = lanes[0]->format;
    const bool wide = format == Format::tf32;  // one number in a register, not two
    const int depth = wide ? 8 : 16, in_register = wide ? 1 : 2;
    float a[16][16], b[16][8];
    double sum[16][8];
    for (int l = 0; l < kLanes; ++l) {
      const int group = l / 4, member = l % 4;
      for (int r = 0; r < 4; ++r)
        for (int e = 0; e < in_register; ++e)
          a[group + 8 * (r % 2)][in_register * member + e + depth / 2 * (r / 2)] =
              number(format, lanes[l]->a[r] >> 16 * e);
      for (int r = 0; r < 2; ++r)
        for (int e = 0; e < in_register; ++e)
          b[in_register * member + e + depth / 2 * r][group] = number(format, lanes[l]->b[r] >> 16 * e);
      for (int r = 0; r < 4; ++r) sum[group + 8 * (r / 2)][2 * member + r % 2] = lanes[l]->d[r];
    }
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < depth; ++k)
        for (int col = 0; col < 8; ++col) sum[row][col] += double(a[row][k]) * double(b[k][col]);
    for (int l = 0; l < kLanes; ++l)
      for (int r = 0; r < 4; ++r) lanes[l]->d[r] = float(sum[l / 4 + 8 * (r / 2)][2 * (l % 4) + r % 2]);
  });
}

void ldmatrix(unsigned (&r)[4], const Row& mine, bool transposed, int line) {
  struct Lane {
    const Row* row;
    unsigned* r;
    bool transposed;
  } lane = {&mine, r, transposed};
  together("ldmatrix", ~0u, lane, line, [](Lane* const* lanes) {
    for (int l = 0; l < kLanes; ++l)
      for (int m = 0; m < 4; ++m) {
        unsigned pair[2];
        for (int e = 0; e < 2; ++e) {
          const int row = l / 4, col = 2 * (l % 4) + e;
          pair[e] = lanes[l]->transposed ? lanes[8 * m + col]->row->entry[row] : lanes[8 * m + row]->row->entry[col];
        }
        lanes[l]->r[m] = pair[0] | pair[1] << 16;
      }
  });
}

}  // namespace emulator
