// Ctrl-C while a kernel runs. Python notices signals between its own instructions, of which a kernel is one; so the
// thread that called looks for them between tiles, and all threads of the loop stop.
#pragma once
#include <atomic>
#include <exception>
#include <thread>

namespace pydml {

// A loop that runs on several threads, and the exception that a Python signal handler raised meanwhile.
class Watched {
 public:
  // Run `loop`; what a handler has raised is raised again here, on the thread that called.
  template <class F>
  static void run(const F& loop) {
    Watched watched;
    try {
      loop(watched);
    } catch (const Stopped&) {
      std::rethrow_exception(watched.raised_);
    }
  }
  // While it lives, `look` on this thread looks after the loop.
  class Thread {
   public:
    explicit Thread(Watched& loop) : outer_(current_) { current_ = &loop; }
    ~Thread() { current_ = outer_; }
    Thread(const Thread&) = delete;
    Thread& operator=(const Thread&) = delete;

   private:
    Watched* const outer_;
  };
  // Between two pieces of work: leaves the loop if there was a signal whose handler raised.
  static void look();
  // The clock starts: what is shorter than the time between two looks never asks Python for its lock.
  static void start();

 private:
  struct Stopped {};
  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic<bool> stopped_{false};
  std::exception_ptr raised_;  // written by the caller's thread before it leaves the loop
  static thread_local Watched* current_;
};

}  // namespace pydml
