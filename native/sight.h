// What owners see of coming batches: who uses a row next, who has it, and which rows stay with their only user.
#pragma once

#include <cstdint>
#include <deque>
#include <span>
#include <vector>

#include "buffer.h"
#include "plan.h"
#include "row_index.h"

namespace colonnade {

// When bytes are saved by lending a row of a table, and how many of its rows a rank may have.
struct LoanWorth {
  std::int64_t quota, least;
  double chance;
  bool passes;
};

// Of one batch: its rows (U,) as its plan lists them, and others that come back with it.
struct SightDecision {
  Buffer<std::uint8_t> has, keeps, copied;
  Buffer<std::int16_t> readers;
  std::vector<std::int64_t> recalled_ids;
  std::vector<std::int64_t> recalled_tables, holders;
  std::vector<std::uint8_t> recopied;
};

// Lists of slots, each of which is in one of them at most; who was put there first comes first.
class SlotQueues {
 public:
  static constexpr std::uint32_t kNone = ~std::uint32_t{0};

  explicit SlotQueues(std::size_t num_queues) : ends_(num_queues, {kNone, kNone}) {}

  void grow(std::size_t num_slots) { links_.resize(num_slots, {kNone, kNone}); }
  std::uint32_t first(std::size_t queue) const { return ends_[queue].next; }
  void append(std::size_t queue, std::uint32_t slot);
  void remove(std::size_t queue, std::uint32_t slot);

 private:
  struct Link {
    std::uint32_t previous, next;
  };
  std::vector<Link> links_;  // by slot
  std::vector<Link> ends_;   // by queue: the last, the first
};

// One table's rows. The rules are told in `cache/sight.py`.
class TableSight {
 public:
  TableSight(std::int64_t num_ranks, const LoanWorth& worth, bool holds, std::int64_t many);

  // Rows [begin, end) of a plan, whose lookups are of these ranks.
  void see(const Plan& plan, std::int64_t begin, std::int64_t end, std::span<const std::int16_t> ranks);
  // Of the oldest batch that was seen.
  void decide(bool is_over, std::int64_t table, SightDecision& done);

  static constexpr std::int16_t kShared = -1, kNobody = -2;
  static constexpr std::int64_t kLong = 4;  // uses in a row are counted up to here

 private:
  static constexpr std::int64_t kNone = -1;

  struct Row {
    std::int64_t id;
    std::int64_t newest;  // number of the newest use
    std::int16_t user;    // of the newest use that was decided on
    std::uint8_t run;     // uses in a row by it alone until then
    bool is_lent;         // the row, or a copy that is yet to be read
  };
  struct Use {
    std::int64_t following;  // number of the row's next use
    std::int16_t user;
    bool rejoins;  // the next one is by several ranks, this one's user among them
  };
  struct Batch {
    std::vector<std::uint32_t> slots;  // ascending by id
    std::vector<std::int64_t> places;  // of these in its plan
  };
  struct Recalled {
    std::int64_t id;
    std::int16_t holder;
    bool is_copied;
  };
  struct Wish {
    std::int64_t soon;
    std::size_t row;
  };

  Use& use(std::int64_t number) { return uses_[static_cast<std::size_t>(number) & (uses_.size() - 1)]; }
  const Use& use(std::int64_t number) const { return const_cast<TableSight*>(this)->use(number); }
  void make_room(std::int64_t uses);
  std::uint32_t take_slot();
  void leave_queues(std::uint32_t slot);
  void recall(std::uint32_t slot, bool is_copied);
  void evict(std::int64_t most);
  bool is_by(std::int16_t user, std::int64_t following) const;
  bool runs_on(std::int16_t user, std::int64_t following) const;
  void lend(std::int64_t rank, std::vector<Wish>& wishes, std::vector<std::uint8_t>& lends);

  LoanWorth worth_;
  bool holds_;
  std::int64_t many_;
  std::vector<std::int64_t> lent_;  // by rank: rows and copies that it has
  // By uses in a row: rows out of sight that were next used by the same rank alone, and that were not.
  std::int64_t right_[kLong + 1], wrong_[kLong + 1];
  RowIndex index_;  // id -> slot, of rows that are remembered
  std::vector<Row> rows_;
  std::vector<std::uint32_t> free_;
  SlotQueues idle_;       // not used in sight: by newest use
  SlotQueues idle_lent_;  // of these, by rank: those that lie there
  std::deque<Batch> seen_;  // those that are to be decided on
  std::vector<Recalled> back_;  // with the next decision
  std::int64_t first_ = 0, end_ = 0;  // numbers of uses in sight
  std::vector<Use> uses_;             // of number i, at i modulo the length, a power of two
};

// All tables of one owner. One thread at a time.
class Sight {
 public:
  Sight(std::int64_t num_ranks, std::span<const LoanWorth> worths, bool holds, std::int64_t many);
  Sight(const Sight&) = delete;
  Sight& operator=(const Sight&) = delete;

  // counts (N, T): rows that each rank named, each once, listed rank by rank, table by table; plan: of these.
  // invalid_argument: nothing changed.
  void see(std::span<const std::int64_t> counts, const Plan& plan);
  SightDecision decide(bool is_over);

 private:
  std::size_t num_ranks_;
  std::deque<TableSight> tables_;
  std::deque<std::size_t> seen_;  // rows of each batch that is to be decided on
};

}  // namespace colonnade
