// Eviction scores of two bytes for the slots of a table that evicts, and the choice of rows to evict.
#pragma once

#include <atomic>
#include <cstdint>
#include <span>

#include "access_frequency.h"
#include "slab.h"
#include "slot_headers.h"

namespace colonnade {

// The score is the access frequency (access_frequency.h) or, from the first hint on, the next use: hints are more accurate.
//
// Eviction takes rows among the lowest 2 %, by a threshold estimated from a random sample. A hand sweeps the scores,
// two bytes a row and many at a time, for those at or below it. Rows below it that were just released go first, so that
// a row with a lower score than the resident ones does not stay. A pinned row is never chosen. If too few rows are
// below the threshold, it is estimated again, and finally any unpinned row goes.
//
// Threads may call use, begin, resume and released for different slots concurrently.
class SlotScores {
 public:
  SlotScores() = default;
  explicit SlotScores(std::int64_t slots);

  std::int64_t bytes(std::int64_t touched) const { return 2 * touched + 4 * num_candidates_; }
  void set_slots(std::int64_t slots) noexcept { slots_ = slots; }
  // Move scores of rows; `choose` may follow after `forget_candidates`.
  void move(std::uint32_t from, std::uint32_t to) noexcept { scores_[to] = scores_[from]; }
  void forget_candidates() noexcept {
    num_candidates_ = 0;
    is_estimated_ = false;
  }
  bool has_hints() const { return flip_ != 0; }
  COLONNADE_INLINE_MEMBER void fetch(std::uint32_t slot) const { __builtin_prefetch(scores_ + slot, 1, 2); }

  // Advance the clock, before the rows of one acquire are used. A count halves after uses of 32 times as many rows as
  // there are slots. touched: slots that were ever used.
  void tick(std::int64_t rows, std::int64_t touched, bool is_hinted) noexcept;

  // next: a code of access_frequency.h; used if there are hints.
  void use(std::uint32_t slot, std::uint8_t next) noexcept {
    scores_[slot] = has_hints() ? hinted(next) : access_frequency::after_use(scores_[slot], now_, random_of(slot));
  }
  void begin(std::uint32_t slot, std::uint8_t next) noexcept {  // first use of a row
    scores_[slot] = has_hints() ? hinted(next) : now_;
  }
  // Begin a row that had been resident before. A score above the threshold is an old count that the clock has lapped;
  // it starts at the threshold.
  void resume(std::uint32_t slot, std::uint8_t frequency) noexcept {
    if (has_hints()) return;
    const std::uint16_t score = access_frequency::from_stored(frequency);
    const std::uint16_t most = is_estimated_ ? threshold_ : access_frequency::kBehind;
    scores_[slot] = access_frequency::after_use(key(score) > most ? score_of(most) : score, now_, random_of(slot));
  }
  // Begin a row that earlier processes used `uses` times, in `steps` steps: adds the uses that would remain of an
  // evenly fed count.
  void recall(std::uint32_t slot, std::uint32_t uses, std::int64_t steps) noexcept;
  std::uint8_t stored_frequency(std::uint32_t slot) const noexcept;  // never kUnknown

  // Scores of rows that move between two tiers of a table, where the lower one takes over the clock of the upper one.
  void follow_clock(const SlotScores& upper, std::int64_t touched) noexcept;
  std::uint16_t score(std::uint32_t slot) const { return scores_[slot]; }
  void begin_at(std::uint32_t slot, std::uint16_t score) noexcept { scores_[slot] = score; }
  void resume_at(std::uint32_t slot, std::uint16_t score) noexcept {
    if (!has_hints()) scores_[slot] = access_frequency::after_use(score, now_, random_of(slot));
  }

  void released(std::uint32_t slot) noexcept {  // after its last pin is released
    if (!is_estimated_ || key(scores_[slot]) > threshold_) return;
    const auto place = std::atomic_ref(num_candidates_).fetch_add(1, std::memory_order_relaxed);
    if (place < most_candidates_) {
      candidates_[place] = slot;
    } else {
      std::atomic_ref(num_candidates_).fetch_sub(1, std::memory_order_relaxed);
    }
  }

  // Choose up to victims.size() slots of unpinned rows, of which `wanted` or more are to go in all; marks them free in
  // `headers`. Returns at least one if there is one.
  std::int64_t choose(std::span<std::uint32_t> victims, std::int64_t wanted, SlotHeaders& headers) noexcept;
  std::uint64_t num_slots_examined() const { return num_slots_examined_; }  // slots examined so far

 private:
  // Ascending with the score: for counts, kBehind is a count of 1; for hints, 65535 - batches until use, 0 if never.
  std::uint16_t key(std::uint16_t score) const { return static_cast<std::uint16_t>((score ^ flip_) + offset_); }
  std::uint16_t score_of(std::uint16_t key) const { return static_cast<std::uint16_t>((key - offset_) ^ flip_); }
  std::uint16_t hinted(std::uint8_t next) const noexcept;
  std::uint32_t random_of(std::uint32_t slot) const {
    return static_cast<std::uint32_t>(mix64(num_ticks_ << 32 | slot) >> 48);
  }

  void change(bool is_hinted, std::int64_t touched) noexcept;
  void refresh_oldest_scores(std::int64_t slots, std::int64_t touched) noexcept;
  void estimate(std::int64_t wanted, const SlotHeaders& headers) noexcept;
  std::int64_t sweep(std::span<std::uint32_t> victims, std::int64_t slots, SlotHeaders& headers) noexcept;

  Slab slab_, candidates_slab_;
  std::uint16_t* scores_ = nullptr;
  std::uint32_t* candidates_ = nullptr;
  std::int64_t num_candidates_ = 0, most_candidates_ = 0;
  std::int64_t slots_ = 0;
  std::uint64_t time_ = 0;  // half-lives, 1/1024 doublings in the high part: 16 bits and 32 more below
  std::uint64_t num_ticks_ = 0;
  std::uint16_t now_ = 0;
  double half_lives_ = 0;  // per tick
  std::uint16_t flip_ = 0, offset_ = access_frequency::kBehind;  // key = (score ^ flip) + offset
  std::uint16_t threshold_ = 0;                      // a key
  bool is_estimated_ = false;
  std::int64_t chosen_until_ = 0, num_chosen_ = 0;  // when to estimate again
  std::int64_t hand_ = 0, apart_hand_ = 0;
  std::uint64_t num_slots_examined_ = 0;
};

}  // namespace colonnade
