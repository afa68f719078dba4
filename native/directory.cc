#include "directory.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "radix.h"
#include "threads.h"

namespace colonnade {

namespace {

constexpr std::int64_t kRun = 2048;                // rows of a batch per thread: as much work as waking a thread
constexpr std::int64_t kMostReserved = 1 << 30;         // address space; memory grows with use
// Entries in 100 buckets of the index. Copies are added and removed, and an overflowed entry stays where it is: at 942
// two thirds of the searches begin at a bucket with overflow, at 860 less than half, for 0.6 bytes a row.
constexpr std::uint64_t kFill = 860;
constexpr std::uint32_t kMostTicks = (1u << 20) - 1;
constexpr std::int64_t kLeastShare = 16, kLateShare = 64;  // one in this many copies is kept in order
constexpr std::int64_t kSmall = 1024;              // this many copies, or fewer, are all kept in order
constexpr std::size_t kAhead = 16;                 // entries with rows fetched early
constexpr std::int64_t kHintExpiry = 64;              // batches
constexpr std::int64_t kShiftUnit = 1 << 20;          // batches: numbers of a continued run differ by a multiple of it

// lfu score: log2 of the count, plus time; in 1/1024 of a doubling. Time is in half-lives.
constexpr int kDoubling = 1024, kTimeShift = 20;
constexpr std::uint64_t kHalfLife = std::uint64_t{kDoubling} << kTimeShift;
constexpr std::uint64_t kTurnover = 1;             // capacities used in a half-life
constexpr std::uint32_t kMostTime = std::numeric_limits<std::uint32_t>::max() - 64 * kDoubling;
constexpr std::uint32_t kScoreDecrement = 1u << 31;       // two million half-lives
constexpr int kGainStep = 16;
// Share that the smaller of two counts adds to the logarithm of the larger, by their distance.
const std::array<std::uint16_t, 12 * kDoubling / kGainStep + 1> kGain = [] {  // the last one: for all larger distances
  std::array<std::uint16_t, 12 * kDoubling / kGainStep + 1> gain{};
  for (std::size_t i = 0; i + 1 < gain.size(); ++i)
    gain[i] = static_cast<std::uint16_t>(std::floor(kDoubling * std::log2(1 + std::exp2(-double(i * kGainStep) / kDoubling)) + 0.5));
  return gain;
}();

constexpr std::uint32_t kKnownUse = 1u << 31;  // lookahead

// Number of uses in one byte: exact below 32, then with five significant bits, up to 31 * 2^14.
constexpr std::uint32_t kExactUses = 32, kMostUsesCode = 255;
const std::array<std::uint32_t, kMostUsesCode + 1> kUses = [] {
  std::array<std::uint32_t, kMostUsesCode + 1> uses{};
  for (std::uint32_t code = 0; code <= kMostUsesCode; ++code)
    uses[code] = code < kExactUses ? code : (16 + code % 16) << ((code - 16) / 16);
  return uses;
}();

// Encode the number of uses of a row in batch `number`. What lies between two codes is rounded up or down by a hash of id
// and batch, with the probability that keeps its mean: so sums of many small additions are right.
std::uint32_t encode_uses(std::int64_t id, std::int64_t number, std::uint32_t uses) {
  if (uses < kExactUses) return uses;
  if (uses >= kUses[kMostUsesCode]) return kMostUsesCode;
  const auto shift = static_cast<std::uint32_t>(std::bit_width(uses)) - 5;
  const std::uint32_t remainder = uses & ((1u << shift) - 1);
  const std::uint64_t batch = mix64(static_cast<std::uint64_t>(number % kShiftUnit) + 1);
  const auto random = static_cast<std::uint32_t>(mix64(static_cast<std::uint64_t>(id) ^ batch) >> (64 - shift));
  return 16 * shift + (uses >> shift) + (random < remainder);
}

constexpr std::uint32_t kMostStamp = 255, kMostGap = 256;
std::uint8_t stamp_of(std::int64_t number) { return static_cast<std::uint8_t>(number); }

// Return the batches since the use with this stamp, 1 .. kMostGap; of an earlier one, any of them.
std::uint32_t gap_since(std::uint32_t stamp, std::int64_t number) {
  return ((static_cast<std::uint32_t>(number) - stamp - 1) & kMostStamp) + 1;
}

void check_ascending(std::span<const std::int64_t> ids, const char* name) {
  bool descends = false;
  for (std::size_t i = 1; i < ids.size(); ++i) descends |= ids[i - 1] >= ids[i];
  for (std::size_t i = 1; descends && i < ids.size(); ++i)
    if (ids[i - 1] >= ids[i])
      throw std::invalid_argument(std::string(name) + ": got " + std::to_string(ids[i]) + " after " +
                                  std::to_string(ids[i - 1]) + ", wanted ids ascending, each once");
}

constexpr std::int64_t kTogether = 16;  // scores compared at a time, most of them without a match

// Return one bit for each of the scores that is 1 .. most.
unsigned up_to(const std::uint32_t* scores, std::uint32_t most) {
  unsigned bits = 0;
#if defined(__SSE2__)
  // Processors with this instruction set have only signed comparisons.
  const __m128i sign = _mm_set1_epi32(INT32_MIN), limit = _mm_xor_si128(_mm_set1_epi32(static_cast<int>(most)), sign);
  const auto four = [&](int k) {
    const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(scores) + k);
    return _mm_cmplt_epi32(_mm_xor_si128(_mm_sub_epi32(values, _mm_set1_epi32(1)), sign), limit);
  };
  const __m128i low = _mm_packs_epi32(four(0), four(1)), high = _mm_packs_epi32(four(2), four(3));
  bits = static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(low, high)));
#else
  for (std::int64_t k = 0; k < kTogether; ++k) bits |= static_cast<unsigned>(scores[k] - 1 < most) << k;
#endif
  return bits;
}

// Maps an id so that ids ascend as unsigned numbers.
std::uint64_t unsigned_order(std::int64_t id) { return static_cast<std::uint64_t>(id) ^ std::uint64_t{1} << 63; }

}  // namespace

Directory::Directory(const DirectorySettings& settings)
    : settings_(settings), index_(0, kFill, std::min(settings.capacity, kMostReserved)) {
  const std::int64_t reserved = std::min(settings.capacity, kMostReserved);
  make_room(reserved + std::min<std::int64_t>(reserved, 1 << 16) + 1024);
}

// Reserve address space for this many slots.
void Directory::make_room(std::int64_t slots) {
  if (slots <= room_) return;
  const auto n = static_cast<std::size_t>(std::max(slots, room_ + room_ / 4));
  if (n >= SlotIndex::kAbsent) throw NoRoom("a cache of " + std::to_string(n) + " rows; wanted less than 2^32");
  Slab rows(checked_bytes(sizeof(Row), n)), scores(checked_bytes(4, n));
  free_.resize((n + 63) / 64);
  std::copy_n(rows_, num_slots_, reinterpret_cast<Row*>(rows.data()));
  std::copy_n(scores_, num_slots_, reinterpret_cast<std::uint32_t*>(scores.data()));
  rows_slab_ = std::move(rows);
  scores_slab_ = std::move(scores);
  rows_ = reinterpret_cast<Row*>(rows_slab_.data());
  scores_ = reinterpret_cast<std::uint32_t*>(scores_slab_.data());
  room_ = static_cast<std::int64_t>(n);
}

DirectoryStep Directory::step(std::span<const std::int64_t> ids, std::span<const std::int32_t> next_uses,
                              std::span<const std::int64_t> entering, std::int64_t window) {
  const auto n = static_cast<std::int64_t>(ids.size());
  check_ascending(ids, "ids");
  check_ascending(entering, "entering");
  if (number_ >= kMostNumber)
    throw std::overflow_error("a cache's directory counts " + std::to_string(number_) +
                              " batches and no more; flush it and go on with a new one");
  make_room(std::max(num_slots_, num_rows_ + n));
  index_.reserve(num_rows_ + n);
  const auto u = static_cast<std::size_t>(n);
  DirectoryStep done;
  done.slots = Buffer<std::int32_t>(u);
  done.ages = Buffer<std::int32_t>(u);
  done.ticks = Buffer<std::int32_t>(u);
  done.outcomes = Buffer<std::uint8_t>(u);
  done.pushed = Buffer<std::uint8_t>(u);
  done.leaving = Buffer<std::uint8_t>(u);
  done.before = Buffer<DirectoryStep::Before>(u);
  done.time = time_;
  done.num_slots = num_slots_;
  if ((time_ >> kTimeShift) >= kMostTime) lower_scores(done);
  done.number = ++number_;
  tick(u);
  index_.grow(this->ids());
  if (settings_.policy == CachePolicy::lookahead && number_ % kHintExpiry == 0) expire_hints(done);
  done.num_expired_hints = done.changed_scores.size();
  find(ids, next_uses, done);
  admit(ids, next_uses, done);
  if (settings_.policy == CachePolicy::lookahead) apply_hints(entering, window, done);
  evict(ids, done);
  return done;
}

void Directory::tick(std::size_t num_rows) noexcept {
  if (settings_.policy != CachePolicy::lfu) return;
  const auto capacity = static_cast<std::uint64_t>(settings_.capacity);
  const std::uint64_t turned = capacity ? (num_rows * kHalfLife) / (kTurnover * capacity) : kHalfLife;
  time_ += std::min(kHalfLife, turned);
}

// Scores are only compared with each other, so all may be lowered by the same amount. A score that would become zero
// becomes the lowest. bad_alloc: nothing changed.
void Directory::lower_scores(DirectoryStep& done) {
  const auto num_underflowing = std::count_if(scores_, scores_ + num_slots_, [](std::uint32_t score) { return score && score <= kScoreDecrement; });
  done.underflowed.reserve(static_cast<std::size_t>(num_underflowing));
  done.decrement = kScoreDecrement;
  for (std::int64_t s = 0; s < num_slots_; ++s) {
    std::uint32_t& score = scores_[s];
    if (score > kScoreDecrement) {
      score -= kScoreDecrement;
    } else if (score) {
      done.underflowed.emplace_back(static_cast<std::uint32_t>(s), score);
      score = 1;
    }
  }
  time_ -= std::uint64_t{kScoreDecrement} << kTimeShift;
  forget_order();
}

void Directory::restore_lowered_scores(const DirectoryStep& done) {
  if (!done.decrement) return;
  for (std::int64_t s = 0; s < num_slots_; ++s)
    if (scores_[s]) scores_[s] += done.decrement;
  for (const auto& [slot, score] : done.underflowed) scores_[slot] = score;
  forget_order();
}

// Search again for the lowest scores.
void Directory::forget_order() noexcept {
  least_.clear();
  late_.clear();
  threshold_ = {0, 0};
}

std::uint32_t Directory::encode_next_use(std::int64_t batches) const noexcept {
  return kKnownUse | static_cast<std::uint32_t>(kKnownUse - 1 - std::min<std::int64_t>(number_ + batches, kKnownUse - 1));
}

std::uint32_t Directory::initial_score(std::int32_t next_use) const noexcept {
  switch (settings_.policy) {
    case CachePolicy::lfu: return static_cast<std::uint32_t>(time_ >> kTimeShift) + 1;
    case CachePolicy::lookahead:
      if (next_use > 0) return encode_next_use(next_use);
      [[fallthrough]];
    default: return static_cast<std::uint32_t>(number_);
  }
}

std::uint32_t Directory::score_after_use(std::uint32_t score, std::uint32_t now) const noexcept {
  if (settings_.policy != CachePolicy::lfu) return now;
  const std::uint32_t larger = std::max(score, now), below = (larger - std::min(score, now)) / kGainStep;
  return larger + kGain[std::min<std::size_t>(below, kGain.size() - 1)];
}

// Update all rows of the batch that have a copy.
void Directory::find(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done) {
  const auto number = static_cast<std::uint32_t>(number_);
  const auto read_bound = static_cast<std::uint64_t>(settings_.clock.read_bound);
  Buffer<std::uint32_t> low_slots(wanted.size());
  std::atomic<std::size_t> num_low{0};
  // Local copies: byte stores below may alias anything reached through `this` or `done`.
  Row* const rows = rows_;
  std::uint32_t* const scores = scores_;
  const std::pair<std::uint32_t, std::int64_t> threshold = threshold_;
  const std::uint32_t score_of_first_use = initial_score(0);
  std::uint32_t* const low = low_slots.data();
  auto* const slots = reinterpret_cast<std::uint32_t*>(done.slots.data());
  std::int32_t *const ages = done.ages.data(), *const all_ticks = done.ticks.data();
  std::uint8_t *const outcomes = done.outcomes.data(), *const pushed = done.pushed.data();
  DirectoryStep::Before* const before = done.before.data();
  std::fill_n(done.leaving.data(), wanted.size(), 0);
  for_each_run(static_cast<std::int64_t>(wanted.size()), kRun, [&](std::int64_t begin, std::int64_t end) {
    index_.find_all(wanted.subspan(begin, end - begin), ids(), slots + begin);
    std::uint32_t resident[kRun];  // the run's rows that have a copy
    std::int64_t num_resident = 0;
    for (std::int64_t i = begin; i < end; ++i) {
      resident[num_resident] = static_cast<std::uint32_t>(i);
      num_resident += slots[i] != SlotIndex::kAbsent;
    }
    for (std::int64_t k = 0; k < num_resident; ++k) {
      const std::uint32_t i = resident[k], slot = slots[i];
      Row row = rows[slot];
      const std::uint32_t score = scores[slot];
      before[i] = {static_cast<std::uint32_t>(row.copied), static_cast<std::uint32_t>(row.ticks),
                   static_cast<std::uint32_t>(row.uses), static_cast<std::uint32_t>(row.stamp), score};
      const std::uint32_t age = number - before[i].copied;
      const std::uint32_t uses = kUses[before[i].uses] + before[i].ticks + 1;
      const std::uint32_t gap = gap_since(before[i].stamp, number_);
      // The copy has made a step of its own for about every `gap`th batch since it was read.
      const bool is_expired = age > read_bound || exceeds_step_bound(age / gap, gap);
      const std::uint32_t ticks = before[i].ticks + 1;
      const bool is_pushed = is_due(ticks, uses, gap);
      if (is_expired) row.copied = number;
      if (is_pushed) row.uses = encode_uses(row.id, number, uses) & kMostUsesCode;
      row.ticks = is_pushed ? 0 : ticks & kMostTicks;
      row.stamp = stamp_of(number);
      rows[slot] = row;
      const std::uint32_t new_score = score_after_use(score, next_uses.empty() ? score_of_first_use : initial_score(next_uses[i]));
      scores[slot] = new_score;
      ages[i] = static_cast<std::int32_t>(age);
      outcomes[i] = static_cast<std::uint8_t>(is_expired ? Outcome::expired : Outcome::hit);
      all_ticks[i] = static_cast<std::int32_t>(ticks);
      pushed[i] = is_pushed;
      if (std::pair(new_score, row.id) <= threshold) low[num_low.fetch_add(1, std::memory_order_relaxed)] = slot;
    }
  });
  for (std::size_t i = 0; i < num_low; ++i) note_score_changed(low[i]);
}

// Return whether pending gradients of `ticks` batches are sent, for a row that `uses` batches have used.
bool Directory::is_due(std::uint32_t ticks, std::uint32_t uses, std::uint32_t gap) const noexcept {
  const DirectoryClock& clock = settings_.clock;
  if (ticks > clock.write_bound || ticks == kMostTicks) return true;
  if (ticks > clock.write_share * uses) return true;
  return exceeds_step_bound(ticks, gap);
}

// Return whether a row's `steps` apart from its owner's row are too many. A row used every batch may make `step_bound`,
// one whose last two uses are `gap` batches apart `gap` times as many.
bool Directory::exceeds_step_bound(std::uint64_t steps, std::uint32_t gap) const noexcept {
  const auto bound = static_cast<std::uint64_t>(settings_.clock.step_bound);
  return bound && steps > bound * gap;
}

// Add copies for rows without one.
void Directory::admit(std::span<const std::int64_t> wanted, std::span<const std::int32_t> next_uses, DirectoryStep& done) {
  const bool is_pushed = is_due(1, 1, kMostGap);
  Buffer<std::uint32_t> missing(wanted.size());
  std::uint32_t* const rows = missing.data();
  std::int32_t* const slots = done.slots.data();
  std::size_t num_missing = 0;
  for (std::uint32_t i = 0; i < wanted.size(); ++i) {  // no branch, because it would be unpredictable
    rows[num_missing] = i;
    num_missing += static_cast<std::uint32_t>(slots[i]) == SlotIndex::kAbsent;
  }
  for (std::size_t m = 0; m < num_missing; ++m) {
    const std::uint32_t slot = take_slot();
    slots[rows[m]] = static_cast<std::int32_t>(slot);
    ids().fetch(slot);
  }
  const auto number = static_cast<std::uint32_t>(number_);
  for (std::size_t m = 0; m < num_missing; ++m) {
    const std::uint32_t i = rows[m], slot = static_cast<std::uint32_t>(slots[i]);
    insert({wanted[i], slot, number, is_pushed ? 0u : 1u, is_pushed ? 1u : 0u, stamp_of(number_), initial_score(next_uses.empty() ? 0 : next_uses[i])});
    done.ages[i] = 0;
    done.outcomes[i] = static_cast<std::uint8_t>(Outcome::miss);
    done.ticks[i] = 1;
    done.pushed[i] = is_pushed;
  }
}

void Directory::change_score(std::uint32_t slot, std::uint32_t score, DirectoryStep& done) {
  done.changed_scores.emplace_back(slot, scores_[slot]);
  scores_[slot] = score;
  note_score_changed(slot);
}

// Restore the scores that changes [begin, end) of the step replaced.
void Directory::restore_scores(const DirectoryStep& done, std::size_t begin, std::size_t end) {
  for (std::size_t i = end; i-- > begin;) {
    const auto [slot, score] = done.changed_scores[i];
    scores_[slot] = score;
    note_score_changed(slot);
  }
}

// A use that was unknown is now known.
void Directory::apply_hints(std::span<const std::int64_t> entering, std::int64_t window, DirectoryStep& done) {
  const std::uint32_t score = encode_next_use(window);
  Buffer<std::uint32_t> slots(entering.size());
  index_.find_all(entering, ids(), slots.data());
  for (std::size_t i = 0; i < entering.size(); ++i)
    if (slots[i] != SlotIndex::kAbsent && scores_[slots[i]] < kKnownUse) change_score(slots[i], score, done);
}

// Predicted uses that did not happen would retain their rows forever.
void Directory::expire_hints(DirectoryStep& done) {
  for (std::int64_t s = 0; s < num_slots_; ++s) {
    const std::uint32_t score = scores_[s];
    if (score >= kKnownUse && kKnownUse - 1 - (score - kKnownUse) < static_cast<std::uint32_t>(number_))
      change_score(static_cast<std::uint32_t>(s), 1, done);
  }
}

void Directory::evict(std::span<const std::int64_t> wanted, DirectoryStep& done) {
  const std::int64_t surplus = num_rows_ - settings_.capacity;
  if (surplus <= 0) return;
  done.evicted.reserve(static_cast<std::size_t>(surplus));
  std::vector<std::uint32_t> dirty;  // among `evicted`
  dirty.reserve(static_cast<std::size_t>(surplus));
  for (std::int64_t left = surplus; left > 0; --left) {
    const std::uint32_t slot = take_least(left).slot;
    const Row& row = rows_[slot];
    done.evicted.push_back(row_at(slot));
    const auto at = row.stamp == stamp_of(number_) ? std::lower_bound(wanted.begin(), wanted.end(), row.id) : wanted.end();
    if (at != wanted.end() && *at == row.id) {
      const auto i = static_cast<std::size_t>(at - wanted.begin());
      done.leaving[i] = done.pushed[i] = 1;
    } else if (row.ticks) {
      dirty.push_back(static_cast<std::uint32_t>(done.evicted.size() - 1));
    }
    remove(slot);
  }
  const auto order = ordered(
      dirty.size(), [](std::uint32_t) { return std::uint64_t{0}; },
      [&](std::uint32_t i) { return unsigned_order(done.evicted[dirty[i]].id); });
  done.evicted_ids = Buffer<std::int64_t>(dirty.size());
  done.evicted_slots = Buffer<std::int32_t>(dirty.size());
  done.evicted_ticks = Buffer<std::int32_t>(dirty.size());
  for (std::size_t i = 0; i < dirty.size(); ++i) {
    const DirectoryRow& row = done.evicted[dirty[order[i]]];
    done.evicted_ids[i] = row.id;
    done.evicted_slots[i] = static_cast<std::int32_t>(row.slot);
    done.evicted_ticks[i] = static_cast<std::int32_t>(row.ticks);
  }
}

void Directory::undo(std::span<const std::int64_t> ids, const DirectoryStep& done) {
  if (done.number != number_ || ids.size() != done.slots.size())
    throw std::invalid_argument("got the decision of batch " + std::to_string(done.number) +
                                " to undo, wanted the newest: " + std::to_string(number_));
  make_room(std::max(num_slots_, num_rows_ + static_cast<std::int64_t>(done.evicted.size())));
  index_.reserve(num_rows_ + static_cast<std::int64_t>(done.evicted.size()));
  index_.grow(this->ids());
  for (const DirectoryRow& row : done.evicted) reinsert(row);
  restore_scores(done, done.num_expired_hints, done.changed_scores.size());
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto slot = static_cast<std::uint32_t>(done.slots[i]);
    if (done.outcomes[i] == static_cast<std::uint8_t>(Outcome::miss)) {
      remove(slot);
      continue;
    }
    const auto& before = done.before[i];
    rows_[slot].copied = before.copied & kMostNumber;
    rows_[slot].ticks = before.ticks & kMostTicks;
    rows_[slot].uses = before.uses & kMostUsesCode;
    rows_[slot].stamp = before.stamp & kMostStamp;
    scores_[slot] = before.score;
    note_score_changed(slot);
  }
  restore_scores(done, 0, done.num_expired_hints);  // the batch's rows among them get their state at the search afterwards
  for (std::int64_t s = done.num_slots; s < num_slots_; ++s) {
    free_[static_cast<std::size_t>(s) / 64] &= ~(std::uint64_t{1} << (s % 64));
    --num_free_;
  }
  num_slots_ = done.num_slots;
  restore_lowered_scores(done);
  time_ = done.time;
  --number_;
}

DirectoryRow Directory::row_at(std::uint32_t slot) const noexcept {
  const Row& row = rows_[slot];
  const auto narrow = [](std::uint64_t bits) { return static_cast<std::uint32_t>(bits); };
  return {row.id, slot, narrow(row.copied), narrow(row.ticks), narrow(row.uses), narrow(row.stamp), scores_[slot]};
}

std::vector<DirectoryRow> Directory::rows() const {
  std::vector<DirectoryRow> result;
  result.reserve(static_cast<std::size_t>(num_rows_));
  for (std::int64_t s = 0; s < num_slots_; ++s) {
    if (scores_[s] == 0) continue;
    result.push_back(row_at(static_cast<std::uint32_t>(s)));
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.id < b.id; });
  return result;
}

std::vector<DirectoryRow> Directory::flush(std::int64_t above) {
  std::vector<DirectoryRow> result = rows();
  std::erase_if(result, [above](const DirectoryRow& row) { return row.ticks <= above; });
  for (const DirectoryRow& row : result) {
    rows_[row.slot].ticks = 0;
    rows_[row.slot].uses = encode_uses(row.id, number_, kUses[row.uses] + row.ticks) & kMostUsesCode;
  }
  return result;
}

// Gradients that were pending elsewhere at a copy's read were within the old bound: the copy counts as read that many
// batches earlier.
void Directory::set_clock(const DirectoryClock& clock) noexcept {
  const std::int64_t lowered = settings_.clock.write_bound - clock.write_bound;
  for (std::int64_t s = 0; lowered > 0 && s < num_slots_; ++s) {
    const std::int64_t copied = rows_[s].copied;
    if (scores_[s]) rows_[s].copied = static_cast<std::uint64_t>(std::max<std::int64_t>(copied - lowered, 0)) & kMostNumber;
  }
  settings_.clock = clock;
}

void Directory::load(std::span<const DirectoryRow> rows, std::int64_t number, std::uint64_t time) {
  if (num_rows_) throw std::invalid_argument("got a directory that has copies to load into, wanted one without");
  std::int64_t num_slots = 0;
  for (const DirectoryRow& row : rows) num_slots = std::max<std::int64_t>(num_slots, row.slot + std::int64_t{1});
  std::vector<bool> is_taken(static_cast<std::size_t>(num_slots));
  for (std::size_t i = 0; i < rows.size(); ++i) {
    if (is_taken[rows[i].slot] || (i && rows[i - 1].id >= rows[i].id) || rows[i].score == 0)
      throw std::invalid_argument("got id " + std::to_string(rows[i].id) + " in slot " + std::to_string(rows[i].slot) +
                                  ", wanted ids ascending, each in a slot of its own, score 1 or more");
    is_taken[rows[i].slot] = true;
  }
  make_room(num_slots);
  index_.reserve(static_cast<std::int64_t>(rows.size()));
  index_.grow(ids());
  std::fill(free_.begin(), free_.end(), 0);
  num_slots_ = num_free_ = num_slots;
  lowest_ = 0;
  for (std::int64_t s = 0; s < num_slots; ++s) {
    free_[static_cast<std::size_t>(s) / 64] |= std::uint64_t{1} << (s % 64);
    scores_[s] = 0;
  }
  threshold_ = {0, 0};
  for (const DirectoryRow& row : rows) reinsert(row);
  number_ = number;
  time_ = time;
}

std::int64_t Directory::bytes() const {
  return index_.bytes() + num_slots_ * static_cast<std::int64_t>(sizeof(Row) + 4) + num_slots_ / 8 +
         static_cast<std::int64_t>((least_.capacity() + late_.capacity()) * sizeof(Entry));
}

std::uint32_t Directory::take_slot() noexcept {
  if (num_free_ == 0) return static_cast<std::uint32_t>(num_slots_++);
  while (free_[lowest_] == 0) ++lowest_;
  const int bit = std::countr_zero(free_[lowest_]);
  free_[lowest_] &= free_[lowest_] - 1;
  --num_free_;
  return static_cast<std::uint32_t>(lowest_ * 64 + static_cast<std::size_t>(bit));
}

// Restore a copy, in a slot that may be free.
void Directory::reinsert(const DirectoryRow& row) {
  std::uint64_t& word = free_[row.slot / 64];
  const std::uint64_t bit = std::uint64_t{1} << (row.slot % 64);
  if (word & bit) --num_free_;
  word &= ~bit;
  insert(row);
}

// Add a copy, in a slot that was taken.
void Directory::insert(const DirectoryRow& row) {
  Row& at = rows_[row.slot];
  at.id = row.id;
  at.copied = row.copied & kMostNumber;
  at.ticks = row.ticks & kMostTicks;
  at.uses = row.uses & kMostUsesCode;
  at.stamp = row.stamp & kMostStamp;
  scores_[row.slot] = row.score;
  index_.insert(row.id, row.slot);
  ++num_rows_;
  note_score_changed(row.slot);
}

void Directory::remove(std::uint32_t slot) noexcept {
  index_.erase(rows_[slot].id, slot);
  scores_[slot] = 0;
  rows_[slot].ticks = 0;
  free_[slot / 64] |= std::uint64_t{1} << (slot % 64);
  lowest_ = std::min<std::size_t>(lowest_, slot / 64);
  ++num_free_;
  --num_rows_;
}

void Directory::add_late(const Entry& entry) {
  const auto most = static_cast<std::size_t>(num_rows_ / kLateShare + kSmall);
  if (late_.size() >= most) return refill_candidates(1);  // finds this row too
  if (late_.size() == late_.capacity()) late_.reserve(std::min(most, 2 * late_.size() + 64));
  late_.push_back(entry);
  std::push_heap(late_.begin(), late_.end(), std::greater<>());
}

// Put the copies with the lowest scores in order, `wanted` of them or more.
void Directory::refill_candidates(std::int64_t wanted) {
  constexpr std::uint64_t kSample = 256;
  least_.clear();
  late_.clear();
  double share = std::max(1.0 / kLeastShare, 1.1 * static_cast<double>(wanted) / static_cast<double>(num_rows_));
  std::vector<std::pair<std::uint32_t, std::int64_t>> sample;
  if (num_rows_ > kSmall && share < 0.5) {
    const auto slots = static_cast<std::uint64_t>(num_slots_);
    for (std::uint64_t i = 0; i < 4 * kSample && sample.size() < kSample; ++i) {
      const std::uint64_t slot = scale_down(mix64(i + (static_cast<std::uint64_t>(number_) << 20) + 1), slots);
      if (scores_[slot]) sample.emplace_back(scores_[slot], rows_[slot].id);
    }
  }
  std::vector<Entry> low;
  for (;; share *= 2) {
    const auto rank = static_cast<std::size_t>(share * static_cast<double>(sample.size()));
    const bool is_all = rank >= sample.size();
    threshold_ = {std::numeric_limits<std::uint32_t>::max(), std::numeric_limits<std::int64_t>::max()};
    if (!is_all) {
      const auto at = sample.begin() + static_cast<std::ptrdiff_t>(rank);
      std::nth_element(sample.begin(), at, sample.end());
      threshold_ = *at;
    }
    low.reserve(static_cast<std::size_t>((is_all ? 1.0 : 1.1 * share) * static_cast<double>(num_rows_)) + 64);
    collect_low(low);
    if (is_all || static_cast<std::int64_t>(low.size()) >= wanted) break;
    low.clear();
  }
  const auto order = ordered(
      low.size(), [&](std::uint32_t i) { return std::uint64_t{low[i].score}; },
      [&](std::uint32_t i) { return unsigned_order(low[i].id); });
  least_.reserve(low.size());
  for (std::size_t i = order.size(); i-- > 0;) least_.push_back(low[order[i]]);
}

// Collect all copies up to the threshold, by slot.
void Directory::collect_low(std::vector<Entry>& low) const {
  constexpr std::int64_t kChunk = 1024;
  const std::uint32_t* const scores = scores_;  // whole pages of scores: unused slots have 0
  const auto threshold = threshold_;
  std::uint32_t slots[kChunk + kTogether];
  for (std::int64_t chunk = 0; chunk < num_slots_; chunk += kChunk) {
    std::int64_t n = 0;
    for (std::int64_t begin = chunk, end = std::min(chunk + kChunk, num_slots_); begin < end; begin += kTogether) {
      unsigned bits = up_to(scores + begin, threshold.first);
      const auto take = [&] {  // written in any case, counted if present, because a branch would be unpredictable
        slots[n] = static_cast<std::uint32_t>(begin) + static_cast<std::uint32_t>(std::countr_zero(bits | 1u << 31));
        n += bits != 0;
        bits &= bits - 1;
      };
      take();
      take();
      take();
      while (bits) take();
    }
    for (std::int64_t k = 0; k < n; ++k) {
      const std::uint32_t slot = slots[k];
      const std::int64_t id = rows_[slot].id;
      if (std::pair(scores[slot], id) <= threshold) low.push_back({scores[slot], slot, id});
    }
  }
}

// Return the copy with the lowest score; there is one. wanted: copies to evict now, including this one.
Directory::Entry Directory::take_least(std::int64_t wanted) {
  for (;;) {
    if (least_.size() >= kAhead) {
      const Entry& ahead = least_[least_.size() - kAhead];
      ids().fetch(ahead.slot);
      index_.prefetch(ahead.id);
    }
    const bool is_late = !late_.empty() && (least_.empty() || least_.back() > late_.front());
    Entry entry;
    if (is_late) {
      std::pop_heap(late_.begin(), late_.end(), std::greater<>());
      entry = late_.back();
      late_.pop_back();
    } else if (!least_.empty()) {
      entry = least_.back();
      least_.pop_back();
    } else {
      refill_candidates(wanted);
      continue;
    }
    if (is_current(entry)) return entry;
  }
}

}  // namespace colonnade
