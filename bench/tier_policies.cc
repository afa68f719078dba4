// How many rows would each policy read? A simulator of caches of rows over one stream, for `bench tiers`.
//
//   tier_policies FOLDER OUT RUN...     RUN = policy:capacity:lookahead[:seen], e.g. lfu:4220000:64
//   tier_policies FOLDER OUT hints      writes OUT: a next-use code for each lookup, uint8 as the ids;
//                                       and FOLDER/first.f32: by row, batches from the start to its first lookup
//
// FOLDER is what workers/tier_stream.py writes: shape.txt (rows, batches, lookups of a batch, half-life in batches),
// rows.i32 (batches, lookups), and of each row at the start of the stream: count.f32 (lookups so far), age.f32
// (batches since the last one), after.f32 (batches from the stream's end to the next one), rate.f32 (lookups per
// sample, the truth). OUT gets one line of JSON for each run: misses per batch, and those on rows never seen before.
//
// A policy starts with what it would hold after endless training, so that no warm-up of millions of samples is
// simulated: `lru` the youngest rows, `lfu` the most counted, `belady` the rows whose two uses around the start are
// nearest to each other. With `:seen` a row that was never looked up is not held.
//
// A batch's rows are acquired `lookahead` batches before it is used and pinned until then; a victim is the unpinned
// row of the smallest key, of equal keys the one let go first; a window that does not fit gets shorter. Keys: lru none, lfu the logarithm of the decayed count,
// belady minus the batch of the next use. `static` and `oracle` hold the rows with most lookups, counted or true, for ever.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Row = int32_t;
constexpr Row kNone = -1;
constexpr int kSteps = 16;           // LFU keys per doubling of the count
constexpr int kMaxLog = 40;          // of counts, log2
constexpr int kHorizon = 1 << 17;    // batches: later next uses are all alike

template <typename T>
std::vector<T> load(const std::string& path, size_t length) {
  std::ifstream file(path, std::ios::binary);
  std::vector<T> values(length);
  if (!file.read(reinterpret_cast<char*>(values.data()), length * sizeof(T)))
    throw std::runtime_error("cannot read " + path + " whole");
  return values;
}

struct Stream {
  size_t num_rows, num_batches, lookups;
  double half_life;                // batches
  std::vector<float> count, age, after;
  std::vector<Row> rows;           // unique rows, batch by batch
  std::vector<size_t> offsets;     // (batches + 1,)
  std::vector<int32_t> next;       // as `rows`: batch of the next use, at most num_batches + kHorizon
  std::vector<int32_t> first;      // by row: batch of the first use
};

int32_t past_end(const Stream& s, Row row) {
  return static_cast<int32_t>(s.num_batches + std::min<double>(s.after[row], kHorizon));
}

Stream open_stream(const std::string& folder, std::vector<Row>& raw) {
  Stream s;
  std::ifstream shape(folder + "/shape.txt");
  if (!(shape >> s.num_rows >> s.num_batches >> s.lookups >> s.half_life))
    throw std::runtime_error("cannot read " + folder + "/shape.txt");
  raw = load<Row>(folder + "/rows.i32", s.num_batches * s.lookups);
  s.count = load<float>(folder + "/count.f32", s.num_rows);
  s.age = load<float>(folder + "/age.f32", s.num_rows);
  s.after = load<float>(folder + "/after.f32", s.num_rows);
  return s;
}

void keep_unique(Stream& s, const std::vector<Row>& raw) {
  std::vector<int32_t> stamp(s.num_rows, -1);
  s.offsets.push_back(0);
  for (size_t b = 0; b < s.num_batches; ++b) {
    for (size_t i = b * s.lookups; i < (b + 1) * s.lookups; ++i) {
      if (stamp[raw[i]] == static_cast<int32_t>(b)) continue;
      stamp[raw[i]] = static_cast<int32_t>(b);
      s.rows.push_back(raw[i]);
    }
    s.offsets.push_back(s.rows.size());
  }
  s.first.resize(s.num_rows);
  for (size_t r = 0; r < s.num_rows; ++r) s.first[r] = past_end(s, static_cast<Row>(r));
  s.next.resize(s.rows.size());
  for (size_t b = s.num_batches; b-- > 0;)
    for (size_t i = s.offsets[b]; i < s.offsets[b + 1]; ++i) {
      s.next[i] = s.first[s.rows[i]];
      s.first[s.rows[i]] = static_cast<int32_t>(b);
    }
}

// As colonnade.cache.next_use: the first c with 2^((c - 1) / 8) >= distance.
uint8_t hint_of(int64_t distance) {
  const double code = 1 + std::ceil(8 * std::log2(static_cast<double>(std::max<int64_t>(1, distance))) - 1e-9);
  return static_cast<uint8_t>(std::min(254.0, code));
}

void write_hints(const Stream& s, const std::vector<Row>& raw, const std::string& folder, const std::string& out) {
  std::vector<int64_t> next(s.num_rows);
  for (size_t r = 0; r < s.num_rows; ++r) next[r] = static_cast<int64_t>(s.num_batches + double(s.after[r]));
  std::vector<uint8_t> codes(raw.size());
  for (size_t b = s.num_batches; b-- > 0;) {
    for (size_t i = b * s.lookups; i < (b + 1) * s.lookups; ++i)
      codes[i] = hint_of(next[raw[i]] - static_cast<int64_t>(b));
    for (size_t i = b * s.lookups; i < (b + 1) * s.lookups; ++i) next[raw[i]] = static_cast<int64_t>(b);
  }
  std::ofstream file(out, std::ios::binary);
  if (!file.write(reinterpret_cast<const char*>(codes.data()), codes.size()))
    throw std::runtime_error("cannot write " + out);
  const std::vector<float> first(next.begin(), next.end());
  std::ofstream uses(folder + "/first.f32", std::ios::binary);
  if (!uses.write(reinterpret_cast<const char*>(first.data()), first.size() * sizeof(float)))
    throw std::runtime_error("cannot write " + folder + "/first.f32");
}

// Queues by key, and the smallest key whose queue is not empty.
class Queues {
 public:
  Queues(size_t num_rows, size_t num_keys)
      : next_(num_rows, kNone), previous_(num_rows, kNone), head_(num_keys, kNone), tail_(num_keys, kNone),
        some_(num_keys / 64 + 1, 0) {}

  void push(Row row, int key) {
    previous_[row] = tail_[key];
    next_[row] = kNone;
    (tail_[key] == kNone ? head_[key] : next_[tail_[key]]) = row;
    tail_[key] = row;
    some_[key / 64] |= uint64_t{1} << (key % 64);
    lowest_ = std::min(lowest_, static_cast<size_t>(key / 64));
  }

  void remove(Row row, int key) {
    const Row p = previous_[row], n = next_[row];
    (p == kNone ? head_[key] : next_[p]) = n;
    (n == kNone ? tail_[key] : previous_[n]) = p;
    if (head_[key] == kNone) some_[key / 64] &= ~(uint64_t{1} << (key % 64));
  }

  // kNone where all are empty.
  Row pop() {
    while (lowest_ < some_.size() && !some_[lowest_]) ++lowest_;
    if (lowest_ == some_.size()) return kNone;
    const int key = static_cast<int>(lowest_ * 64) + __builtin_ctzll(some_[lowest_]);
    const Row row = head_[key];
    remove(row, key);
    return row;
  }

 private:
  std::vector<Row> next_, previous_, head_, tail_;
  std::vector<uint64_t> some_;
  size_t lowest_ = 0;
};

struct Run {
  std::string name, policy;
  size_t capacity = 0, lookahead = 0;
  bool only_seen = false;
  std::vector<int> misses, births;  // by batch
};

Run parse(const std::string& text) {
  Run run;
  run.name = text;
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == ':') parts.emplace_back();
    else parts.back().push_back(c);
  }
  if (parts.size() < 3) throw std::runtime_error("got run " + text + ", wanted policy:capacity:lookahead[:seen]");
  run.policy = parts[0];
  run.capacity = std::stoull(parts[1]);
  run.lookahead = std::stoull(parts[2]);
  run.only_seen = parts.size() > 3 && parts[3] == "seen";
  return run;
}

float batches_to_first_use(const Stream& s, Row row) {
  const auto end = static_cast<int32_t>(s.num_batches);
  return s.first[row] < end ? static_cast<float>(s.first[row]) : static_cast<float>(end) + s.after[row];
}

// The rows held at the start, in the order in which they are let go.
std::vector<Row> start_rows(const Stream& s, const Run& run, const std::vector<float>& rate) {
  std::vector<Row> rows;
  rows.reserve(s.num_rows);
  for (size_t r = 0; r < s.num_rows; ++r)
    if (!run.only_seen || s.count[r] > 0) rows.push_back(static_cast<Row>(r));
  std::vector<float> worth(s.num_rows);
  for (size_t r = 0; r < s.num_rows; ++r)
    worth[r] = run.policy == "belady"   ? -(s.age[r] + batches_to_first_use(s, static_cast<Row>(r)))
               : run.policy == "oracle" ? rate[r]
               : run.policy == "lru"    ? -s.age[r]
                                        : s.count[r];
  const auto better = [&](Row a, Row b) {
    if (worth[a] != worth[b]) return worth[a] > worth[b];
    if (s.age[a] != s.age[b]) return s.age[a] < s.age[b];
    return a < b;
  };
  if (rows.size() > run.capacity) {
    std::nth_element(rows.begin(), rows.begin() + run.capacity, rows.end(), better);
    rows.resize(run.capacity);
  }
  if (run.policy != "static" && run.policy != "oracle")  // oldest first
    std::sort(rows.begin(), rows.end(), [&](Row a, Row b) { return s.age[a] != s.age[b] ? s.age[a] > s.age[b] : a > b; });
  return rows;
}

void hold_for_ever(const Stream& s, Run& run, const std::vector<float>& rate) {
  std::vector<uint8_t> held(s.num_rows, 0), seen(s.num_rows);
  for (size_t r = 0; r < s.num_rows; ++r) seen[r] = s.count[r] > 0;
  for (const Row row : start_rows(s, run, rate)) held[row] = 1;
  for (size_t b = 0; b < s.num_batches; ++b) {
    int misses = 0, births = 0;
    for (size_t i = s.offsets[b]; i < s.offsets[b + 1]; ++i) {
      misses += !held[s.rows[i]];
      births += !held[s.rows[i]] && !seen[s.rows[i]];
      seen[s.rows[i]] = 1;
    }
    run.misses.push_back(misses);
    run.births.push_back(births);
  }
}

void simulate(const Stream& s, Run& run) {
  const bool lfu = run.policy == "lfu", belady = run.policy == "belady";
  const size_t num_keys = belady ? s.num_batches + kHorizon + 1 : lfu ? kMaxLog * kSteps : 1;
  Queues queues(s.num_rows, num_keys);
  std::vector<uint8_t> held(s.num_rows, 0), seen(s.num_rows);
  std::vector<uint16_t> pins(s.num_rows, 0);
  std::vector<int32_t> key(s.num_rows, 0);
  std::vector<float> heat;  // log2 of the decayed count, as of batch 0
  const auto key_of_heat = [](float h) { return std::clamp(static_cast<int>(std::floor((h + 1) * kSteps)), 0, kMaxLog * kSteps - 1); };
  if (lfu) {
    heat.resize(s.num_rows);
    for (size_t r = 0; r < s.num_rows; ++r) heat[r] = s.count[r] > 0 ? std::log2(s.count[r]) : -100.f;
  }
  const int32_t last = static_cast<int32_t>(num_keys) - 1;
  size_t used = 0;
  for (size_t r = 0; r < s.num_rows; ++r) {
    seen[r] = s.count[r] > 0;
    if (lfu) key[r] = key_of_heat(heat[r]);
    if (belady) key[r] = last - s.first[r];
  }
  for (const Row row : start_rows(s, run, {})) {
    held[row] = 1;
    ++used;
    queues.push(row, key[row]);
  }
  size_t released = 0;  // batches
  const auto release = [&](size_t b) {
    for (size_t i = s.offsets[b]; i < s.offsets[b + 1]; ++i)
      if (!--pins[s.rows[i]]) queues.push(s.rows[i], key[s.rows[i]]);
  };
  const auto acquire = [&](size_t b) {
    int misses = 0, births = 0;
    const double now = static_cast<double>(b) / s.half_life;
    for (size_t i = s.offsets[b]; i < s.offsets[b + 1]; ++i) {
      const Row row = s.rows[i];
      if (held[row]) {
        if (!pins[row]) queues.remove(row, key[row]);
      } else {
        ++misses;
        births += !seen[row];
        if (used < run.capacity) {
          ++used;
        } else {
          Row victim = queues.pop();
          // A window that does not fit gets shorter: the oldest batch is used before more is acquired.
          for (; victim == kNone && released < b; victim = queues.pop()) release(released++);
          if (victim == kNone) throw std::runtime_error("a batch does not fit");
          held[victim] = 0;
        }
        held[row] = 1;
      }
      ++pins[row];
      seen[row] = 1;
      if (lfu) {
        const double high = std::max<double>(heat[row], now), low = std::min<double>(heat[row], now);
        heat[row] = static_cast<float>(high + std::log2(1 + std::exp2(low - high)));
        key[row] = key_of_heat(heat[row]);
      }
      if (belady) key[row] = last - s.next[i];
    }
    run.misses.push_back(misses);
    run.births.push_back(births);
  };
  for (size_t b = 0; b < s.num_batches; ++b) {
    acquire(b);
    while (released + run.lookahead <= b) release(released++);
  }
}

void print(std::ofstream& out, const Run& run) {
  const auto list = [&](const std::vector<int>& values) {
    for (size_t i = 0; i < values.size(); ++i) out << (i ? "," : "") << values[i];
  };
  out << "{\"run\": \"" << run.name << "\", \"misses\": [";
  list(run.misses);
  out << "], \"births\": [";
  list(run.births);
  out << "]}\n";
}

}  // namespace

int main(int count, char** words) try {
  if (count < 4) throw std::runtime_error("usage: tier_policies FOLDER OUT RUN... | hints");
  const std::string folder = words[1], out = words[2];
  std::vector<Row> raw;
  Stream stream = open_stream(folder, raw);
  if (std::string(words[3]) == "hints") {
    write_hints(stream, raw, folder, out);
    return 0;
  }
  keep_unique(stream, raw);
  std::vector<Row>().swap(raw);
  std::vector<Run> runs;
  for (int i = 3; i < count; ++i) runs.push_back(parse(words[i]));
  const std::vector<float> rate = load<float>(folder + "/rate.f32", stream.num_rows);
  std::atomic<size_t> turn{0};
  std::atomic<bool> failed{false};
  std::string why;
  const auto work = [&] {
    for (size_t i; !failed && (i = turn++) < runs.size();) try {
        if (runs[i].policy == "static" || runs[i].policy == "oracle") hold_for_ever(stream, runs[i], rate);
        else if (runs[i].policy == "lru" || runs[i].policy == "lfu" || runs[i].policy == "belady") simulate(stream, runs[i]);
        else throw std::runtime_error("unknown policy " + runs[i].policy);
      } catch (const std::exception& error) {
        if (!failed.exchange(true)) why = runs[i].name + ": " + error.what();
      }
  };
  std::thread other(work);
  work();
  other.join();
  if (failed) throw std::runtime_error(why);
  std::ofstream file(out);
  for (const Run& run : runs) print(file, run);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
