#include "slot_scores.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <utility>

namespace colonnade {

namespace {

constexpr std::int64_t kHalfLife = 32;        // uses, relative to the number of slots
constexpr std::int64_t kSample = 1024;        // rows from which the threshold is estimated
constexpr double kQuantile = 0.02;
constexpr std::int64_t kBlock = 64;           // scores compared together
constexpr std::uint16_t kFarthest = 0xbfff;   // largest distance in batches that a hint distinguishes
constexpr std::uint16_t kAll = 0xffff;        // every key is at or below it
constexpr std::int64_t kApart = 1024;         // ticks in which the oldest scores of all slots are moved up once

}  // namespace

SlotScores::SlotScores(std::int64_t slots)
    : slab_(checked_bytes(2, static_cast<std::size_t>(slots + kBlock))),
      scores_(reinterpret_cast<std::uint16_t*>(slab_.data())),
      slots_(slots) {
  most_candidates_ = std::min<std::int64_t>(slots / 64 + 16, 1 << 16);
  candidates_slab_ = Slab(checked_bytes(4, static_cast<std::size_t>(most_candidates_)));
  candidates_ = reinterpret_cast<std::uint32_t*>(candidates_slab_.data());
}

void SlotScores::tick(std::int64_t rows, std::int64_t touched, bool is_hinted) noexcept {
  ++num_ticks_;
  if (is_hinted != has_hints()) change(is_hinted, touched);
  if (has_hints()) {
    now_ = static_cast<std::uint16_t>(num_ticks_);
    offset_ = now_;
  } else {
    half_lives_ = std::min(1.0, static_cast<double>(rows) / static_cast<double>(kHalfLife * std::max<std::int64_t>(1, slots_)));
    time_ += static_cast<std::uint64_t>(half_lives_ * access_frequency::kDoubling * 0x1p32);
    now_ = static_cast<std::uint16_t>(time_ >> 32);
    offset_ = static_cast<std::uint16_t>(access_frequency::kBehind - now_);
  }
  refresh_oldest_scores(touched / kApart + rows / 64 + 1, touched);
}

void SlotScores::follow_clock(const SlotScores& upper, std::int64_t touched) noexcept {
  if (upper.num_ticks_ == num_ticks_) return;
  num_ticks_ = upper.num_ticks_;
  time_ = upper.time_;
  if (upper.has_hints() != has_hints()) change(upper.has_hints(), touched);
  now_ = upper.now_;
  offset_ = upper.offset_;
  refresh_oldest_scores(touched / kApart + 1, touched);
}

// Scores of one kind cannot be compared with the other.
void SlotScores::change(bool is_hinted, std::int64_t touched) noexcept {
  flip_ = is_hinted ? 0xffff : 0;
  now_ = static_cast<std::uint16_t>(is_hinted ? num_ticks_ : time_ >> 32);
  offset_ = is_hinted ? now_ : static_cast<std::uint16_t>(access_frequency::kBehind - now_);
  is_estimated_ = false;
  num_candidates_ = 0;
  const std::uint16_t score = score_of(is_hinted ? 0xffff - kFarthest : access_frequency::kBehind);
  std::fill_n(scores_, touched, score);
}

// Time is modulo 2^16: scores so old that they would soon look new are moved up, a part of the slots at a time.
void SlotScores::refresh_oldest_scores(std::int64_t slots, std::int64_t touched) noexcept {
  const std::uint16_t least = has_hints() ? 0xffff - kFarthest : 8 * access_frequency::kDoubling;
  const std::uint16_t moved = score_of(has_hints() ? 0 : least);
  const std::int64_t begin = apart_hand_ < touched ? apart_hand_ : 0;
  const std::int64_t end = std::min(touched, begin + slots);
  const std::uint16_t flip = flip_, offset = offset_;
  for (std::int64_t s = begin; s < end; ++s) {
    const auto key = static_cast<std::uint16_t>((scores_[s] ^ flip) + offset);
    scores_[s] = key < least ? moved : scores_[s];
  }
  num_slots_examined_ += static_cast<std::uint64_t>(end - begin);
  apart_hand_ = end;
}

std::uint16_t SlotScores::hinted(std::uint8_t next) const noexcept {
  if (next == next_use::kNever) return score_of(0);
  if (next == next_use::kUnknown) return score_of(is_estimated_ ? threshold_ : 0xffff - kFarthest);
  return score_of(static_cast<std::uint16_t>(0xffff - std::min<std::uint32_t>(next_use::kBatches[next], kFarthest)));
}

void SlotScores::recall(std::uint32_t slot, std::uint32_t uses, std::int64_t steps) noexcept {
  if (has_hints() || uses == 0) return;
  const double decay = std::numbers::ln2 * half_lives_ * static_cast<double>(steps);  // of the first of these uses
  const double remaining = decay > 0 ? -std::expm1(-decay) / decay : 1.0;
  const double doublings = std::clamp(std::log2(remaining * uses), -8.0, 23.0);
  const auto score = static_cast<std::uint16_t>(now_ + std::lround(doublings * access_frequency::kDoubling));
  scores_[slot] = access_frequency::after_use(scores_[slot], score, random_of(slot));  // `after_use` adds any two counts
}

// A row used every d batches has a count of about half-life / (ln 2 * d), in uses of rows by batches.
std::uint8_t SlotScores::stored_frequency(std::uint32_t slot) const noexcept {
  if (!has_hints()) return access_frequency::to_stored(score_of(std::max(key(scores_[slot]), std::uint16_t{access_frequency::kDoubling})));
  const std::uint16_t own_key = key(scores_[slot]);
  const double batches = own_key == 0 ? 0x1p20 : std::max(1.0, 65535.0 - own_key);
  return static_cast<std::uint8_t>(std::max(1.0, 4.0 * (20.0 - std::log2(batches))));
}

std::int64_t SlotScores::choose(std::span<std::uint32_t> victims, std::int64_t wanted, SlotHeaders& headers) noexcept {
  const std::int64_t touched = headers.num_touched();
  if (!is_estimated_ || num_chosen_ >= chosen_until_) estimate(wanted, headers);
  std::int64_t n = 0;
  const auto room = static_cast<std::int64_t>(victims.size());
  while (n < room && num_candidates_ > 0) {
    const std::uint32_t slot = candidates_[--num_candidates_];
    if (key(scores_[slot]) <= threshold_ && headers.begin_eviction(slot)) victims[n++] = slot;
  }
  for (int attempt = 0; n < room && attempt < 3; ++attempt) {
    if (attempt) estimate(wanted - n, headers);
    // Among this many slots the wanted rows are found if all are like the sample; four times that means a bad estimate.
    const double expected = static_cast<double>(room - n) / kQuantile;
    n += sweep(victims.subspan(n), std::min<std::int64_t>(touched, 4 * static_cast<std::int64_t>(expected) + 4096), headers);
  }
  if (n == 0) {
    const std::uint16_t threshold = std::exchange(threshold_, kAll);
    n += sweep(victims, touched, headers);
    threshold_ = threshold;
  }
  num_chosen_ += n;
  return n;
}

// Return the score of the lowest `wanted` rows, and at least of the lowest 2 %.
void SlotScores::estimate(std::int64_t wanted, const SlotHeaders& headers) noexcept {
  const std::int64_t touched = headers.num_touched();
  std::uint16_t keys[kSample];
  std::int64_t n = 0, num_sampled = 0;
  const auto sample_slot = [&](std::uint32_t slot) {
    ++num_sampled;
    if (headers.is_resident(slot) && !headers.is_pinned(slot)) keys[n++] = key(scores_[slot]);
  };
  if (touched <= kSample) {
    for (std::int64_t s = 0; s < touched; ++s) sample_slot(static_cast<std::uint32_t>(s));
  } else {
    constexpr std::int64_t kAhead = 16;
    std::uint32_t coming[kAhead];
    std::uint64_t counter = num_ticks_ << 20 ^ static_cast<std::uint64_t>(num_chosen_);
    const auto draw = [&] {
      const auto slot = static_cast<std::uint32_t>(scale_down(mix64(counter += 0x9e3779b97f4a7c15u), static_cast<std::uint64_t>(touched)));
      headers.fetch(slot);
      fetch(slot);
      return slot;
    };
    for (auto& slot : coming) slot = draw();
    for (std::int64_t i = 0; i < kSample; ++i) {
      const std::uint32_t slot = coming[i % kAhead];
      coming[i % kAhead] = draw();
      sample_slot(slot);
    }
  }
  num_slots_examined_ += static_cast<std::uint64_t>(num_sampled);
  is_estimated_ = true;
  num_chosen_ = 0;
  if (n == 0) {
    threshold_ = kAll;
    chosen_until_ = wanted;
    return;
  }
  const double unpinned = static_cast<double>(n) / static_cast<double>(num_sampled) * static_cast<double>(touched);
  const double share = std::max(kQuantile, static_cast<double>(wanted) / unpinned);
  const auto rank = std::clamp<std::int64_t>(static_cast<std::int64_t>(std::ceil(share * static_cast<double>(n))) - 1, 0, n - 1);
  std::nth_element(keys, keys + rank, keys + n);
  threshold_ = keys[rank];
  chosen_until_ = std::max<std::int64_t>(1, static_cast<std::int64_t>(share * unpinned / 2));
}

// Examine up to `slots` slots from the hand on.
std::int64_t SlotScores::sweep(std::span<std::uint32_t> victims, std::int64_t slots, SlotHeaders& headers) noexcept {
  const std::int64_t touched = headers.num_touched();
  const std::uint16_t flip = flip_, offset = offset_, threshold = threshold_;
  std::int64_t n = 0;
  const auto room = static_cast<std::int64_t>(victims.size());
  while (n < room && slots > 0) {
    if (hand_ >= touched) hand_ = 0;
    const std::int64_t count = std::min({kBlock, touched - hand_, slots});
    const std::uint16_t* const scores = scores_ + hand_;
    std::uint16_t lowest = kAll;  // whole blocks: there is memory beyond the last slot too
    for (std::int64_t i = 0; i < kBlock; ++i)
      lowest = std::min(lowest, static_cast<std::uint16_t>((scores[i] ^ flip) + offset));
    std::int64_t i = 0;
    if (lowest <= threshold) {
      for (; i < count && n < room; ++i) {
        if (key(scores[i]) <= threshold && headers.begin_eviction(static_cast<std::uint32_t>(hand_ + i)))
          victims[n++] = static_cast<std::uint32_t>(hand_ + i);
      }
    } else {
      i = count;
    }
    hand_ += i;
    slots -= i;
    num_slots_examined_ += static_cast<std::uint64_t>(i);
  }
  return n;
}

}  // namespace colonnade
