// The threads of one decode step: they go through its stages together, in one parallel region.
//
// A stage's work is cut into pieces that threads claim; a stage is over when all its pieces are done. Nobody waits for
// a thread, only for pieces, and a piece that has been claimed is at work: so a step gets done with however many
// threads the region gives it, and when, one after the other if need be. A thread that comes late finds the stages
// before over. A piece is half of a thread's share of what is left (guided self-scheduling, Polychronopoulos and Kuck
// 1987): weights are read in long runs, and the end is even.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "../simd.h"

namespace qwen_patch::cpu::decode {

class Team {
 public:
  explicit Team(int64_t threads) : threads_(threads) {}

  // One thread's place in the order of stages, which all threads must go through alike.
  class Member {
   public:
    explicit Member(Team& team) : team_(team) {}

    // body(i) for i in [0, n), n > 0. Returns when all of it is done, by whomever.
    template <typename Body>
    void stage(int64_t n, const Body& body) {
      int64_t first;
      while ((first = team_.claim(stage_, n)) < n) {
        int64_t count = team_.piece(first, n);
        for (int64_t i = first; i < first + count; ++i) body(i);
        team_.finish(stage_, count, n);
      }
      ++stage_;
      team_.wait_for(stage_);
    }

   private:
    Team& team_;
    uint64_t stage_ = 0;
  };

 private:
  static constexpr int STAGE = 40;  // the bits above hold the stage's number, those below what is claimed of it

  // How many there are in the piece that starts at `first`.
  int64_t piece(int64_t first, int64_t n) const { return std::max<int64_t>(1, (n - first) / (2 * threads_)); }

  // The first of a piece of that stage; n where none is left.
  int64_t claim(uint64_t stage, int64_t n) {
    uint64_t now = claimed_.load(std::memory_order_acquire);
    for (;;) {
      int64_t first = static_cast<int64_t>(now & ((1ull << STAGE) - 1));
      if (now >> STAGE != stage || first >= n) return n;
      if (claimed_.compare_exchange_weak(now, now + static_cast<uint64_t>(piece(first, n)), std::memory_order_acq_rel))
        return first;
    }
  }
  void finish(uint64_t stage, int64_t count, int64_t n) {
    if (done_.fetch_add(count, std::memory_order_acq_rel) + count != n) return;
    done_.store(0, std::memory_order_relaxed);  // nobody adds to it before the next line
    claimed_.store((stage + 1) << STAGE, std::memory_order_release);
  }
  void wait_for(uint64_t stage) {
    // A stage takes microseconds: asleep, a thread would miss it. Where others want the processor, it gives way.
    constexpr int SPINS = 2000;
    for (int spin = 0; claimed_.load(std::memory_order_acquire) >> STAGE < stage; ++spin) {
#if QP_X86
      __builtin_ia32_pause();
#endif
      if (spin >= SPINS) std::this_thread::yield();
    }
  }

  const int64_t threads_;
  alignas(64) std::atomic<uint64_t> claimed_{0};
  alignas(64) std::atomic<int64_t> done_{0};
};

}  // namespace qwen_patch::cpu::decode
