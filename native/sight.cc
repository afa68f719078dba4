#include "sight.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>

namespace colonnade {

void SlotQueues::append(std::size_t queue, std::uint32_t slot) {
  Link& ends = ends_[queue];
  links_[slot] = {ends.previous, kNone};
  (ends.previous == kNone ? ends.next : links_[ends.previous].next) = slot;
  ends.previous = slot;
}

void SlotQueues::remove(std::size_t queue, std::uint32_t slot) {
  Link& ends = ends_[queue];
  const auto [previous, next] = links_[slot];
  (previous == kNone ? ends.next : links_[previous].next) = next;
  (next == kNone ? ends.previous : links_[next].previous) = previous;
}

TableSight::TableSight(std::int64_t num_ranks, const LoanWorth& worth, bool holds, std::int64_t many)
    : worth_(worth),
      holds_(holds),
      many_(many),
      lent_(static_cast<std::size_t>(num_ranks), 0),
      idle_(1),
      idle_lent_(static_cast<std::size_t>(num_ranks)),
      uses_(1) {
  std::ranges::fill(right_, 1);
  std::ranges::fill(wrong_, 1);
}

void TableSight::make_room(std::int64_t uses) {
  const auto wanted = static_cast<std::size_t>(uses);
  if (wanted <= uses_.size()) return;
  std::vector<Use> grown(std::bit_ceil(wanted));
  for (std::int64_t i = first_; i < end_; ++i) grown[static_cast<std::size_t>(i) & (grown.size() - 1)] = use(i);
  uses_ = std::move(grown);
}

std::uint32_t TableSight::take_slot() {
  if (free_.empty()) {
    rows_.emplace_back();
    idle_.grow(rows_.size());
    idle_lent_.grow(rows_.size());
    return static_cast<std::uint32_t>(rows_.size() - 1);
  }
  const std::uint32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

// Of a row that no use in sight has.
void TableSight::leave_queues(std::uint32_t slot) {
  idle_.remove(0, slot);
  if (rows_[slot].is_lent) idle_lent_.remove(static_cast<std::size_t>(rows_[slot].user), slot);
}

// A row that is lent; it is in no queue of those any more.
void TableSight::recall(std::uint32_t slot, bool is_copied) {
  Row& row = rows_[slot];
  back_.push_back({row.id, row.user, is_copied});
  row.is_lent = is_copied;
  if (!is_copied) --lent_[static_cast<std::size_t>(row.user)];
}

void TableSight::see(const Plan& plan, std::int64_t begin, std::int64_t end, std::span<const std::int16_t> ranks) {
  const auto n = static_cast<std::size_t>(end - begin);
  Batch batch{std::vector<std::uint32_t>(n), std::vector<std::int64_t>(n)};
  std::iota(batch.places.begin(), batch.places.end(), begin);
  const auto id_at = [&](std::int64_t place) { return plan.unique_ids[static_cast<std::size_t>(place)]; };
  if (!std::ranges::is_sorted(batch.places, {}, id_at)) std::ranges::sort(batch.places, {}, id_at);
  std::vector<std::int64_t> ids(n), found(n), new_ids, new_slots;
  std::ranges::transform(batch.places, ids.begin(), id_at);
  index_.get(ids, found);
  make_room(end_ - first_ + end - begin);
  for (std::size_t i = 0; i < n; ++i) {
    const auto place = static_cast<std::size_t>(batch.places[i]);
    const std::span users(plan.entries.data() + plan.segment_offsets[place],
                          plan.entries.data() + plan.segment_offsets[place + 1]);
    const auto rank_of = [&](std::int32_t entry) { return ranks[static_cast<std::size_t>(entry)]; };
    const std::int16_t user = users.size() == 1 ? rank_of(users[0]) : kShared;
    const auto is_shared_with = [&](std::int16_t rank) {
      return user == kShared && std::ranges::any_of(users, [&](std::int32_t entry) { return rank_of(entry) == rank; });
    };
    const std::int64_t number = end_ + static_cast<std::int64_t>(i);
    use(number) = {kNone, user, false};
    const bool is_new = found[i] == RowIndex::kAbsent;
    const std::uint32_t slot = is_new ? take_slot() : static_cast<std::uint32_t>(found[i]);
    Row& row = rows_[slot];
    if (is_new) {
      row = {ids[i], number, kNobody, 0, false};
      new_ids.push_back(ids[i]);
      new_slots.push_back(slot);
    } else if (row.newest >= first_) {
      Use& before = use(row.newest);
      before.following = number;
      before.rejoins = is_shared_with(before.user);
    } else {
      leave_queues(slot);
      const bool is_same = row.user == user;
      ++(is_same ? right_ : wrong_)[row.run];
      if (!is_same && row.is_lent) recall(slot, is_shared_with(row.user));
    }
    row.newest = number;
    batch.slots[i] = slot;
  }
  index_.put(new_ids, new_slots);
  end_ += end - begin;
  evict(end_ - first_ + worth_.quota * static_cast<std::int64_t>(lent_.size()));
  for (std::size_t run = 0; run <= kLong; ++run) {
    if (right_[run] + wrong_[run] <= many_) continue;
    right_[run] /= 2;
    wrong_[run] /= 2;
  }
  seen_.push_back(std::move(batch));
}

// So many rows are remembered: those used last.
void TableSight::evict(std::int64_t most) {
  std::vector<std::int64_t> gone;
  for (std::int64_t surplus = index_.size() - most; surplus > 0; --surplus) {
    const std::uint32_t slot = idle_.first(0);
    const Row& row = rows_[slot];
    leave_queues(slot);
    ++wrong_[row.run];
    if (row.is_lent) recall(slot, false);
    gone.push_back(row.id);
    free_.push_back(slot);
  }
  index_.erase(gone);
}

// In use number `following` that rank alone.
bool TableSight::is_by(std::int16_t user, std::int64_t following) const {
  return user != kShared && following != kNone && use(following).user == user;
}

// `least` uses in a row by that rank alone, the first of them before `following`, are in sight.
bool TableSight::runs_on(std::int16_t user, std::int64_t following) const {
  for (std::int64_t left = worth_.least - 1; left > 0; --left) {
    if (!is_by(user, following)) return false;
    following = use(following).following;
  }
  return true;
}

// The rank's wishes, as far as there is room.
void TableSight::lend(std::int64_t rank, std::vector<Wish>& wishes, std::vector<std::uint8_t>& lends) {
  const auto r = static_cast<std::size_t>(rank);
  const std::int64_t num_soon = std::ranges::count_if(wishes, [&](const Wish& wish) { return wish.soon < end_; });
  for (std::int64_t wanted = num_soon - (worth_.quota - lent_[r]); wanted > 0; --wanted) {
    const std::uint32_t slot = idle_lent_.first(r);
    if (slot == SlotQueues::kNone) break;
    idle_lent_.remove(r, slot);
    recall(slot, false);
  }
  const auto room = static_cast<std::size_t>(std::max<std::int64_t>(0, worth_.quota - lent_[r]));
  if (wishes.size() > room) {
    std::ranges::stable_sort(wishes, {}, &Wish::soon);
    wishes.resize(room);
  }
  for (const Wish& wish : wishes) lends[wish.row] = 1;
  lent_[r] += static_cast<std::int64_t>(wishes.size());
}

void TableSight::decide(bool is_over, std::int64_t table, SightDecision& done) {
  const Batch batch = std::move(seen_.front());
  seen_.pop_front();
  const std::size_t n = batch.slots.size();
  std::vector<std::uint8_t> runs(n), stays(n), lends(n, 0);
  std::vector<std::vector<Wish>> wishes(lent_.size());
  for (std::size_t i = 0; i < n; ++i) {
    const Row& row = rows_[batch.slots[i]];
    const auto [following, user, rejoins] = use(first_ + static_cast<std::int64_t>(i));
    const bool is_alone = user != kShared, has = is_alone && row.is_lent;
    const auto run = static_cast<std::size_t>(
        is_alone ? std::min<std::int64_t>(kLong, (row.user == user ? row.run : 0) + 1) : 0);
    const bool is_next = is_by(user, following), is_read = is_alone && rejoins;
    const bool is_free = is_alone && following == kNone && holds_ && !is_over;
    const bool is_read_here = is_read && (has || worth_.passes);
    const bool is_staying = is_next || is_read_here || (has && is_free);
    const auto pays = [&] {
      const auto right = static_cast<double>(right_[run]), both = static_cast<double>(right_[run] + wrong_[run]);
      return right > worth_.chance * both;
    };
    if (row.is_lent && !is_staying) --lent_[static_cast<std::size_t>(row.user)];
    if (is_alone && !has && ((is_next && runs_on(user, following)) || ((is_next || is_free) && pays()) || is_read_here))
      wishes[static_cast<std::size_t>(user)].push_back({following == kNone ? end_ : following, i});
    runs[i] = static_cast<std::uint8_t>(run);
    stays[i] = has && is_staying;
  }
  for (std::size_t rank = 0; rank < wishes.size(); ++rank)
    if (!wishes[rank].empty()) lend(static_cast<std::int64_t>(rank), wishes[rank], lends);
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t slot = batch.slots[i];
    Row& row = rows_[slot];
    const std::int64_t number = first_ + static_cast<std::int64_t>(i);
    const auto [following, user, rejoins] = use(number);
    const bool is_alone = user != kShared, is_staying = stays[i] || lends[i];
    const auto place = static_cast<std::size_t>(batch.places[i]);
    done.has[place] = is_alone && row.is_lent;
    done.keeps[place] = is_staying && !rejoins;
    done.copied[place] = is_staying && rejoins;
    done.readers[place] = row.is_lent && !is_alone ? row.user : kNobody;
    row.is_lent = is_staying;
    row.user = user;
    row.run = runs[i];
    if (row.newest != number) continue;
    idle_.append(0, slot);
    if (is_staying) idle_lent_.append(static_cast<std::size_t>(user), slot);
  }
  first_ += static_cast<std::int64_t>(n);
  for (const auto& [id, holder, is_copied] : back_) {
    done.recalled_ids.push_back(id);
    done.recalled_tables.push_back(table);
    done.holders.push_back(holder);
    done.recopied.push_back(is_copied);
  }
  back_.clear();
}

Sight::Sight(std::int64_t num_ranks, std::span<const LoanWorth> worths, bool holds, std::int64_t many)
    : num_ranks_(static_cast<std::size_t>(num_ranks)) {
  for (const LoanWorth& worth : worths) tables_.emplace_back(num_ranks, worth, holds, many);
}

void Sight::see(std::span<const std::int64_t> counts, const Plan& plan) {
  const std::size_t num_tables = tables_.size();
  const auto named = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (counts.size() != num_ranks_ * num_tables || plan.block_offsets.size() != num_tables + 1 ||
      static_cast<std::size_t>(named) != plan.entries.size())
    throw std::invalid_argument("got a plan of " + std::to_string(plan.entries.size()) + " lookups of " +
                                std::to_string(plan.block_offsets.size() - 1) + " tables and " +
                                std::to_string(counts.size()) + " counts of " + std::to_string(named) +
                                " rows; wanted a plan of what ranks named, one owner to each of " +
                                std::to_string(num_tables) + " tables");
  std::vector<std::int16_t> ranks(static_cast<std::size_t>(named));
  auto at = ranks.begin();
  for (std::size_t i = 0; i < counts.size(); ++i)
    at = std::fill_n(at, counts[i], static_cast<std::int16_t>(i / num_tables));
  for (std::size_t t = 0; t < num_tables; ++t)
    tables_[t].see(plan, plan.block_offsets[t], plan.block_offsets[t + 1], ranks);
  seen_.push_back(plan.unique_ids.size());
}

SightDecision Sight::decide(bool is_over) {
  if (seen_.empty()) throw std::invalid_argument("got no batch to decide on; see one first");
  const std::size_t n = seen_.front();
  seen_.pop_front();
  SightDecision done{Buffer<std::uint8_t>(n), Buffer<std::uint8_t>(n), Buffer<std::uint8_t>(n), Buffer<std::int16_t>(n),
                     {}, {}, {}, {}};
  for (std::size_t t = 0; t < tables_.size(); ++t) tables_[t].decide(is_over, static_cast<std::int64_t>(t), done);
  return done;
}

}  // namespace colonnade
