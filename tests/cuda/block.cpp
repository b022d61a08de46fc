// How a block runs: fibers take turns until all have ended, and switch at barriers and where lanes of a warp meet.
#include "block.h"

#include <stdio.h>

#include <numeric>

namespace emulator {

thread_local Thread* thread = nullptr;
thread_local Block* block = nullptr;

namespace {

#if defined(EMULATOR_TSAN)
constexpr unsigned kNoSync = 1;  // a switch of fibers does not order their accesses
#endif

// The race checker sees calls of malloc and memset even from here; in this object's life it looks away.
struct Quiet {
#if defined(EMULATOR_TSAN)
  Quiet() {
    AnnotateIgnoreReadsBegin("", 0);
    AnnotateIgnoreWritesBegin("", 0);
  }
  ~Quiet() {
    AnnotateIgnoreReadsEnd("", 0);
    AnnotateIgnoreWritesEnd("", 0);
  }
#else
  Quiet() {}
#endif
};

// Fibers: a stack and where on it the fiber stopped.

#if defined(__x86_64__)
extern "C" void emulator_switch(void** from, void* to);
asm(R"(
.text
.type emulator_switch, @function
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size emulator_switch, .-emulator_switch
)");
#else
#error "the emulator switches fibers by hand, and knows how on x86-64 only"
#endif

Running& here() { return *static_cast<Running*>(block); }
Fiber& self() { return *static_cast<Fiber*>(thread); }

void yield() {
  Fiber& f = self();
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(f.state == State::done ? nullptr : &f.asan, here().asan_stack, here().asan_bytes);
#endif
#if defined(EMULATOR_TSAN)
  __tsan_switch_to_fiber(here().tsan, kNoSync);
#endif
  emulator_switch(&f.stopped, here().scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(f.asan, nullptr, nullptr);
#endif
}

void fiber_main() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &here().asan_stack, &here().asan_bytes);
#endif
  Running& b = here();
  Fiber& f = self();
  try {
    b.launch->body(b.launch->data);
    if (!f.copies.empty()) b.wrong("cp.async: the thread ends without having waited for its copies");
  } catch (const std::exception& error) {
    if (b.error.empty()) b.error = error.what();
  }
#if defined(EMULATOR_TSAN)
  __tsan_release(&b.launch->done_sync);
#endif
  f.state = State::done;
  --b.live;
  b.alive[f.warp] &= ~(1u << f.lane);
  yield();
  abort();
}

}  // namespace

Stack::Stack() {
  void* const memory =
      mmap(nullptr, guard + bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) throw Error("no memory for the stacks of the emulated threads");
  memory_ = static_cast<unsigned char*>(memory);
  mprotect(memory_, guard, PROT_NONE);
}

void Running::wrong(const std::string& what) const {
  char where[128];
  snprintf(where, sizeof where, " (block %u,%u,%u", index.x, index.y, index.z);
  std::string text = what + where;
  if (thread) {
    snprintf(where, sizeof where, ", thread %u,%u,%u", thread->index.x, thread->index.y, thread->index.z);
    text += where;
  }
  throw Error(text + ")");
}

void Running::prepare(Fiber& f, unsigned number) {
  f.index = {number % threads.x, number / threads.x % threads.y, number / (threads.x * threads.y)};
  f.number = number;
  f.lane = number % kLanes;
  f.warp = number / kLanes;
  f.state = State::ready;
  f.copies.clear();
  f.groups.clear();
  f.open = f.landed = 0;
  f.asan = nullptr;
  Place& place = places[used_places + number];
  f.stack = place.stack.bottom();
  // Stacks that all begin at the same place of a page would share few lines of the cache.
  void** top = reinterpret_cast<void**>(f.stack + Stack::bytes - 64 - number % 61 * 192);
  *--top = nullptr;  // where fiber_main would return to
  *--top = reinterpret_cast<void*>(&fiber_main);
  for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
  f.stopped = top;
#if defined(EMULATOR_TSAN)
  if (!place.tsan) place.tsan = __tsan_create_fiber(0);
  f.tsan = place.tsan;
  f.begun = false;
#endif
}

void Running::resume(Fiber& f) {
  thread = &f;
#if defined(__SANITIZE_ADDRESS__)
  void* mine;
  __sanitizer_start_switch_fiber(&mine, f.stack, Stack::bytes);
#endif
#if defined(EMULATOR_TSAN)
  // What was there before the launch comes before all that its threads do.
  __tsan_switch_to_fiber(f.tsan, f.begun ? kNoSync : 0);
  f.begun = true;
#endif
  emulator_switch(&scheduler, f.stopped);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(mine, nullptr, nullptr);
#endif
  thread = nullptr;
}

// Let the threads go on if all that are left have arrived.
void Running::pass_barrier() {
  if (!waiting || waiting != live) return;
  for (Fiber& f : fibers)
    if (f.state == State::at_barrier) {
      f.passed = {&sync[barriers % 2], int(votes), int(waiting)};
      f.state = State::ready;
    }
  ++barriers;
  waiting = votes = 0;
}

void Running::schedule() {
  std::vector<unsigned> turns(fibers.size());
  std::iota(turns.begin(), turns.end(), 0u);
  const uint64_t salt = index.x + 1009ull * index.y + 1000003ull * index.z;
  launch->order.apply(turns, salt);
  for (uint64_t round = 1; live && error.empty(); ++round) {
    bool moved = false;
    for (unsigned turn : turns) {
      Fiber& f = fibers[turn];
      if (f.state != State::ready) continue;
      moved = true;
      resume(f);
      if (!error.empty()) return;
      pass_barrier();
    }
    if (!moved) {
      std::string stuck = "deadlock:";
      int shown = 0;
      for (const Fiber& f : fibers)
        if (f.state != State::done && shown++ < 4)
          stuck += " thread " + std::to_string(f.number) + " waits in " + f.waits_in + " of line " +
                   std::to_string(f.line) + ";";
      stuck.back() = '.';
      throw Error(stuck);
    }
    if (launch->order.kind == Order::random) launch->order.apply(turns, salt + (round << 32));
  }
}

void Running::run(Launch& l, uint64_t number) {
  launch = &l;
  threads = l.threads;
  grid = l.grid;
  index = {unsigned(number % grid.x), unsigned(number / grid.x % grid.y),
           unsigned(number / (uint64_t(grid.x) * grid.y))};
  const unsigned n = threads.x * threads.y * threads.z, warps = (n + kLanes - 1) / kLanes;
  live = n;
  waiting = votes = barriers = 0;
  fixed_bytes = 0;
  error.clear();
  fibers.resize(n);
  while (places.size() < used_places + n) places.emplace_back();
  meetings.assign(n, Meeting());
  alive.assign(warps, ~0u);
  if (n % kLanes) alive.back() = (1u << n % kLanes) - 1;
  sync.assign(2 + 2 * n, 0);
#if defined(EMULATOR_TSAN)
  tsan = __tsan_get_current_fiber();
#endif
  for (unsigned i = 0; i < n; ++i) prepare(fibers[i], i);
  block = this;
  try {
    schedule();
  } catch (const std::exception& wrong) {
    error = wrong.what();
  }
  block = nullptr;
  retire();
}

void Running::retire() {
#if defined(EMULATOR_TSAN)
  for (Fiber& f : fibers)
    if (f.state != State::done) {  // left behind after an error: what it did is not to be taken for a race
      __tsan_switch_to_fiber(f.tsan, 0);
      __tsan_switch_to_fiber(tsan, 0);
    }
  for (auto& [tag, piece] : fixed) retired.push_back(std::move(piece));
  for (auto& [offset, piece] : dynamic) retired.push_back(std::move(piece));
  retired_sync.push_back(std::move(sync));
  used_places += fibers.size();
#elif defined(__SANITIZE_ADDRESS__)
  for (Fiber& f : fibers) ASAN_UNPOISON_MEMORY_REGION(f.stack, Stack::bytes);
#endif
  fixed.clear();
  dynamic.clear();
}

void fail(const char* what, int line) { here().wrong(std::string(what) + ", in line " + std::to_string(line)); }

void* static_piece(const void* tag, size_t bytes) {
  const Quiet quiet;
  Running& b = here();
  auto found = b.fixed.find(tag);
  if (found == b.fixed.end()) {
    b.fixed_bytes += (bytes + 127) / 128 * 128;
    if (b.fixed_bytes > kSharedByDefault) b.wrong("static shared memory: more than 48 KiB");
    if (b.fixed_bytes + b.launch->shared > b.launch->limit) b.wrong("static and dynamic shared memory: over the limit");
    found = b.fixed.emplace(tag, Piece(bytes)).first;
  }
  return found->second.data();
}

void* dynamic_piece(size_t offset, size_t bytes) {
  const Quiet quiet;
  Running& b = here();
  if (offset + bytes > b.launch->shared)
    b.wrong("dynamic shared memory: pieces of " + std::to_string(offset + bytes) + " bytes taken, launched with " +
            std::to_string(b.launch->shared));
  auto found = b.dynamic.find(offset);
  if (found == b.dynamic.end()) found = b.dynamic.emplace(offset, Piece(bytes)).first;
  if (found->second.bytes != bytes) b.wrong("dynamic shared memory: threads take pieces of different sizes");
  return found->second.data();
}

void* barrier_sync() { return &here().sync[here().barriers % 2]; }

void* fence_sync() { return &here().launch->fence; }

Passed barrier(bool vote, const char* file, int line) {
  Running& b = here();
  Fiber& f = self();
  if (!b.waiting) {
    b.barrier_file = file;
    b.barrier_line = line;
  } else if (b.barrier_line != line || strcmp(b.barrier_file, file)) {
    b.wrong("__syncthreads: threads diverge, some are in line " + std::to_string(b.barrier_line) + ", others in line " +
            std::to_string(line));
  }
  f.waits_in = "__syncthreads";
  f.line = line;
  f.state = State::at_barrier;
  ++b.waiting;
  b.votes += vote;
  b.pass_barrier();
  if (f.state == State::at_barrier) yield();
  return f.passed;
}

void* warp_sync(unsigned mask) {
  Running& b = here();
  const unsigned leader = self().warp * kLanes + unsigned(__builtin_ctz(mask | 1u << 31));
  return leader < b.meetings.size() ? &b.sync[2 + 2 * leader + b.meetings[leader].past % 2] : &b.sync[0];
}

void collective(const char* what, unsigned mask, void* mine, int line, void (*run)(void* const*, unsigned)) {
  Running& b = here();
  Fiber& f = self();
  const auto wrong = [&](const std::string& how) {
    b.wrong(std::string(what) + " in line " + std::to_string(line) + ": " + how);
  };
  if (!(mask >> f.lane & 1)) wrong("the calling lane is not in the mask");
  if (mask & ~b.alive[f.warp]) wrong("the mask names lanes that have ended or do not exist");
  Meeting& meeting = b.meetings[f.warp * kLanes + unsigned(__builtin_ctz(mask))];
  if (!meeting.arrived) {
    meeting.mask = mask;
    meeting.what = what;
    meeting.line = line;
  } else if (meeting.mask != mask || meeting.what != what || meeting.line != line) {
    wrong("lanes of the warp diverge, others are at " + std::string(meeting.what) + " in line " +
          std::to_string(meeting.line));
  }
  meeting.lane[f.lane] = mine;
  meeting.arrived |= 1u << f.lane;
  if (meeting.arrived != mask) {
    f.waits_in = what;
    f.line = line;
    f.state = State::in_warp;
    yield();
    return;
  }
  run(meeting.lane, mask);
  meeting.arrived = 0;
  ++meeting.past;
  for (unsigned others = mask & ~(1u << f.lane); others; others &= others - 1)
    b.fibers[f.warp * kLanes + unsigned(__builtin_ctz(others))].state = State::ready;
}

void remember(const Copy& copy) {
  const Quiet quiet;
  self().copies.push_back(copy);
  ++self().open;
}

void cp_async_commit() {
  const Quiet quiet;
  self().groups.push_back(self().open);
  self().open = 0;
}

bool next_landed(Copy& copy, int pending) {
  const Quiet quiet;
  Fiber& f = self();
  for (; f.groups.size() > size_t(pending); f.groups.pop_front()) f.landed += f.groups.front();
  if (!f.landed) return false;
  --f.landed;
  copy = f.copies.front();
  f.copies.pop_front();
  return true;
}

}  // namespace emulator
