// A block while it runs: its fibers, barriers, shared memory. Shared by the two files of the emulator that need it.
#pragma once

#include <stdlib.h>
#include <sys/mman.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "emulator.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(EMULATOR_TSAN)  // the emulator itself is not instrumented
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void*);
void __tsan_release(void*);
void AnnotateIgnoreReadsBegin(const char*, int);
void AnnotateIgnoreReadsEnd(const char*, int);
void AnnotateIgnoreWritesBegin(const char*, int);
void AnnotateIgnoreWritesEnd(const char*, int);
}
#endif

namespace emulator {

constexpr unsigned kLanes = 32, kMostThreads = 1024;
constexpr size_t kSharedByDefault = 48 * 1024;

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A stack, with a page below it that nothing may touch.
class Stack {
 public:
#if defined(EMULATOR_TSAN)  // whose own memory for it is four times as large
  static constexpr size_t bytes = 64 * 1024;
#else
  static constexpr size_t bytes = 256 * 1024;
#endif
  Stack();
  Stack(Stack&& other) : memory_(std::exchange(other.memory_, nullptr)) {}
  ~Stack() {
    if (memory_) munmap(memory_, guard + bytes);
  }
  unsigned char* bottom() const { return memory_ + guard; }

 private:
  static constexpr size_t guard = 4096;
  unsigned char* memory_;
};

// What a fiber runs on. The race checker knows fibers and stacks by their addresses, so for it none is used twice in a
// launch; from launch to launch, and for everybody else from block to block, they are.
struct Place {
  Stack stack;
  void* tsan = nullptr;
};

enum class State : uint8_t { ready, at_barrier, in_warp, done };

struct Fiber : Thread {
  unsigned number, lane, warp;
  State state;
  void* stopped;         // its stack pointer
  unsigned char* stack;  // its lowest byte
  const char* waits_in;
  int line;
  Passed passed;
  std::deque<Copy> copies;    // under way
  std::deque<size_t> groups;  // how many of them each closed group has
  size_t open, landed;        // copies of the open group; of those that the present wait lands
  void* tsan = nullptr;
  bool begun;
  void* asan = nullptr;
};

// Lanes that meet: those of a mask, known by its lowest lane. Each leaves a pointer to what it brings and takes.
struct Meeting {
  unsigned arrived = 0, mask;
  const char* what;
  int line;
  void* lane[kLanes];
  unsigned past = 0;  // how many times its lanes have met
};

// A piece of shared memory with room on both sides that nothing may touch.
struct Piece {
  static constexpr size_t margin = 128;
  std::unique_ptr<unsigned char, decltype(&free)> memory{nullptr, &free};
  size_t bytes = 0;

  explicit Piece(size_t n) : bytes(n) {
    memory.reset(static_cast<unsigned char*>(aligned_alloc(128, whole())));
    memset(memory.get(), 0xff, whole());
#if defined(__SANITIZE_ADDRESS__)
    ASAN_POISON_MEMORY_REGION(memory.get(), margin);
    ASAN_POISON_MEMORY_REGION(data() + bytes, whole() - margin - bytes);
#endif
  }
  Piece(Piece&&) = default;
  ~Piece() {
#if defined(__SANITIZE_ADDRESS__)
    if (memory) ASAN_UNPOISON_MEMORY_REGION(memory.get(), whole());
#endif
  }
  size_t whole() const { return (bytes + 127) / 128 * 128 + 2 * margin; }
  unsigned char* data() const { return memory.get() + margin; }
};

struct Order {
  enum { forward, reverse, random } kind = forward;
  uint64_t seed = 0;

  void apply(std::vector<unsigned>& v, uint64_t salt) const {
    if (kind == reverse) std::reverse(v.begin(), v.end());
    if (kind != random) return;
    uint64_t state = seed * 0x9e3779b97f4a7c15u + salt * 0x2545f4914f6cdd1du + 1;
    for (size_t i = v.size(); i > 1; --i) {
      state = state * 6364136223846793005u + 1442695040888963407u;
      std::swap(v[i - 1], v[(state >> 33) % i]);
    }
  }
};

struct Launch {
  const void* kernel;
  dim3 grid, threads;
  size_t shared, limit;
  void (*body)(void*);
  void* data;
  Order order;
  char done_sync = 0;  // what finished threads release and the host acquires
  char fence = 0;
};

// Everything that a running block needs; kept from block to block, because stacks are dear.
struct Running : Block {
  Launch* launch;
  std::vector<Fiber> fibers;
  std::vector<Place> places;
  size_t used_places = 0;
  std::vector<Meeting> meetings;  // one for each thread: that of the masks whose lowest lane it is
  std::vector<unsigned> alive;    // lanes of each warp
  std::map<const void*, Piece> fixed;
  std::map<size_t, Piece> dynamic;
  std::vector<char> sync;  // addresses that the race checker knows barriers and meetings by
  size_t fixed_bytes;
  unsigned live, waiting, votes, barriers;
  const char* barrier_file;
  int barrier_line;
  std::string error;
  void* scheduler;  // its stack pointer
  void* tsan = nullptr;
  const void* asan_stack = nullptr;
  size_t asan_bytes = 0;
  std::vector<Piece> retired;  // under the race checker addresses are not used twice in a launch
  std::vector<std::vector<char>> retired_sync;

  void run(Launch& l, uint64_t number);
  void schedule();
  void resume(Fiber& f);
  void prepare(Fiber& f, unsigned number);
  void pass_barrier();
  void retire();
  [[noreturn]] void wrong(const std::string& what) const;
};

}  // namespace emulator
