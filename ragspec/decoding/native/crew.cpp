#include "crew.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <system_error>
#include <thread>

#include "lanes.h"

namespace ragspec {

std::mutex crew_mutex;

namespace {

inline void breathe() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

// While a job is being written its shares are closed.
constexpr uint32_t CLOSED = 0xffffffff;
// Pauses before a thread that finds nothing sleeps, some 100 microseconds: longer than the gaps inside a step.
constexpr int PATIENCE = 3000;
constexpr int MOST_THREADS = 256;

// A thread's part of a job. A job's number and the next unit stand in one word: whoever takes a unit thereby proves that the
// job it read is still the one at hand. Each share has a cache line of its own, and each thread begins with its own share, so
// that from job to job it meets the rows and columns it wrote itself.
struct alignas(64) Share {
  std::atomic<uint64_t> ticket{CLOSED};
  alignas(64) std::atomic<int> done{0};  // units that its owner did, of any share
};

class Crew {
 public:
  void run(int threads, int units, const std::function<void(int)>& work) {
    threads = recruit(threads);
    const uint64_t job = (shares[0].ticket.load(std::memory_order_relaxed) >> 32) + 1;
    for (int i = 0; i < all; i++) shares[i].ticket.store(job << 32 | CLOSED, std::memory_order_seq_cst);
    // Released, so that whoever reads one of them knows that the shares were closed, and takes no unit on the strength of it.
    this->work.store(&work, std::memory_order_release);
    this->units.store(units, std::memory_order_release);
    if (this->threads.exchange(threads, std::memory_order_acq_rel) < threads) this->threads.notify_all();
    for (int i = 0; i < all; i++) shares[i].done.store(0, std::memory_order_release);
    for (int i = threads - 1; i >= 0; i--)
      shares[i].ticket.store(job << 32 | (uint32_t)begin(i, units, threads), std::memory_order_seq_cst);
    if (sleepers.load(std::memory_order_seq_cst)) {
      bell.fetch_add(1, std::memory_order_seq_cst);
      bell.notify_all();
    }
    while (take(0)) {
    }
    for (int waited = 0; finished() < units; waited++) {
      if (waited < PATIENCE) breathe();
      else std::this_thread::yield();  // whoever holds the last unit may be waiting for this core
    }
  }

 private:
  static int begin(int share, int units, int threads) { return (int)((int64_t)units * share / threads); }

  // So many threads, or as many as the system gives.
  int recruit(int threads) {
    try {
      for (; all < threads; all++) std::thread([this, self = all] { serve(self); }).detach();
    } catch (const std::system_error&) {
    }
    return threads < all ? threads : all;
  }

  int finished() {
    int count = 0;
    for (int i = 0; i < all; i++) count += shares[i].done.load(std::memory_order_acquire);
    return count;
  }

  // Does one unit of the job at hand, of the thread's own share if one is left there; false where none is left anywhere.
  bool take(int self) {
    const int threads = this->threads.load(std::memory_order_acquire);
    for (int i = 0; i < threads; i++)
      if (take_of((self + i) % threads, self)) return true;
    return false;
  }

  bool take_of(int owner, int self) {
    uint64_t seen = shares[owner].ticket.load(std::memory_order_seq_cst);
    for (;;) {
      const uint32_t unit = (uint32_t)seen;
      const int units = this->units.load(std::memory_order_acquire), threads = this->threads.load(std::memory_order_acquire);
      if (unit == CLOSED || (int)unit >= begin(owner + 1, units, threads)) return false;
      const std::function<void(int)>* work = this->work.load(std::memory_order_acquire);
      if (shares[owner].ticket.compare_exchange_weak(seen, seen + 1, std::memory_order_seq_cst)) {
        (*work)((int)unit);
        shares[self].done.fetch_add(1, std::memory_order_release);
        return true;
      }
    }
  }

  void serve(int self) {
    for (;;) {
      for (int wanted; (wanted = threads.load(std::memory_order_acquire)) <= self;) threads.wait(wanted);
      const uint64_t seen = shares[self].ticket.load(std::memory_order_acquire);
      // A job that is being written is still to come.
      const uint64_t job = (seen >> 32) - ((uint32_t)seen == CLOSED);
      while (take(self)) {
      }
      const auto changed = [&] {
        const uint64_t now = shares[self].ticket.load(std::memory_order_seq_cst);
        return now >> 32 != job && (uint32_t)now != CLOSED;
      };
      int idle = 0;
      while (!changed() && ++idle < PATIENCE) breathe();
      if (idle < PATIENCE) continue;
      const uint32_t heard = bell.load(std::memory_order_seq_cst);
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      if (!changed()) bell.wait(heard, std::memory_order_seq_cst);
      sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
  }

  std::unique_ptr<Share[]> shares{new Share[MOST_THREADS]};
  int all = 1;  // threads there are, the caller's included
  alignas(64) std::atomic<const std::function<void(int)>*> work{nullptr};
  std::atomic<int> units{0}, threads{0};
  alignas(64) std::atomic<uint32_t> bell{0};
  std::atomic<int> sleepers{0};
};

}  // namespace

void share_out(int threads, int units, const std::function<void(int)>& work) {
  threads = threads < MOST_THREADS ? threads : MOST_THREADS;
  if (threads <= 1 || units <= 1) {
    for (int unit = 0; unit < units; unit++) work(unit);
    return;
  }
  static Crew* crew = new Crew;  // never ends: its threads may outlive whatever the process's end destroys first
  crew->run(threads, units, work);
}

}  // namespace ragspec
