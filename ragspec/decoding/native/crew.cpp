#include "crew.h"

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "lanes.h"

namespace ragspec {

namespace {

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// A job's number and its next unit in one word: a thread that takes a unit thereby proves that the job it read is still the
// one at hand. While a job is being written its word is closed.
constexpr uint32_t CLOSED = 0xffffffff;
// Pauses before a thread that finds nothing sleeps, some 100 microseconds: longer than the gaps inside a step.
constexpr int PATIENCE = 2000;

class Crew {
 public:
  void run(int threads, int units, const std::function<void(int)>& work) {
    while ((int)members.size() < threads - 1) members.emplace_back([this] { serve(); }).detach();
    const uint64_t job = (ticket.load(std::memory_order_relaxed) >> 32) + 1;
    ticket.store(job << 32 | CLOSED, std::memory_order_seq_cst);
    this->work.store(&work, std::memory_order_relaxed);
    this->units.store(units, std::memory_order_relaxed);
    done.store(0, std::memory_order_relaxed);
    ticket.store(job << 32, std::memory_order_seq_cst);
    ticket.notify_all();
    while (take()) {
    }
    for (int waited = 0; done.load(std::memory_order_acquire) < units; waited++) {
      if (waited < PATIENCE) breathe();
      else std::this_thread::yield();  // whoever holds the last unit may be waiting for this core
    }
  }

 private:
  // Does one unit of the job at hand; false where none is left.
  bool take() {
    uint64_t seen = ticket.load(std::memory_order_seq_cst);
    for (;;) {
      const uint32_t unit = (uint32_t)seen;
      if (unit == CLOSED || (int)unit >= units.load(std::memory_order_relaxed)) return false;
      const std::function<void(int)>* job = work.load(std::memory_order_relaxed);
      if (ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_seq_cst)) {
        (*job)((int)unit);
        done.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void serve() {
    for (int idle = 0;;) {
      const uint64_t seen = ticket.load(std::memory_order_acquire);
      if (take()) idle = 0;
      else if (++idle < PATIENCE) breathe();
      else {
        ticket.wait(seen, std::memory_order_acquire);
        idle = 0;
      }
    }
  }

  std::vector<std::thread> members;
  std::atomic<uint64_t> ticket{CLOSED};
  std::atomic<const std::function<void(int)>*> work{nullptr};
  std::atomic<int> units{0}, done{0};
};

}  // namespace

void share_out(int threads, int units, const std::function<void(int)>& work) {
  if (threads <= 1 || units <= 1) {
    for (int unit = 0; unit < units; unit++) work(unit);
    return;
  }
  static Crew* crew = new Crew;  // never ends: its threads may outlive whatever the process's end destroys first
  crew->run(threads, units, work);
}

}  // namespace ragspec
