// Signals that arrive while a kernel runs: see interrupt.h. The one file of the engines that knows Python.
#include "cpu/interrupt.h"

#include <pybind11/pybind11.h>

#include <chrono>

namespace pydml {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::milliseconds kBetweenLooks(50);
thread_local Clock::time_point last_look;

}  // namespace

thread_local Watched* Watched::current_ = nullptr;

void Watched::start() { last_look = Clock::now(); }

void Watched::look() {
  Watched* const loop = current_;
  if (!loop) return;
  if (loop->stopped_.load(std::memory_order_relaxed)) throw Stopped();
  if (std::this_thread::get_id() != loop->caller_ || Clock::now() - last_look < kBetweenLooks) return;
  const pybind11::gil_scoped_acquire lock;
  const bool raised = PyErr_CheckSignals() != 0;  // runs the handlers, on Python's main thread only
  last_look = Clock::now();
  if (!raised) return;
  loop->raised_ = std::make_exception_ptr(pybind11::error_already_set());
  loop->stopped_.store(true, std::memory_order_relaxed);
  throw Stopped();
}

}  // namespace pydml
