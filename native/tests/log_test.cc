// Logs, and reads of several at once by one reader, while others write, collect garbage and freeze.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "../row_log.h"
#include "check.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kPage = 4096;

// A row says which id it is, in which version, all over.
std::uint8_t byte_of(std::int64_t id, std::uint32_t version, std::size_t at) {
  return static_cast<std::uint8_t>(mix64(static_cast<std::uint64_t>(id) * 31 + version) >> (at % 57));
}

// A log and its files, which vanish with their descriptors.
struct Store {
  std::size_t width;
  RowLog log;
  std::map<std::int64_t, int> fds;  // the writer's

  Store(std::int64_t record_bytes, std::int64_t rows)
      : width(static_cast<std::size_t>(record_bytes)),
        log({.record_bytes = record_bytes, .rows = rows, .segment_bytes = 40'000, .chunk_bytes = 2 * kPage, .num_streams = 2}) {}
  ~Store() {
    for (const auto& [segment, fd] : fds) ::close(fd);
  }
  Store(const Store&) = delete;

  void write(const std::vector<std::int64_t>& ids, std::uint32_t version, std::int64_t stream = 0) {
    const std::vector<std::uint8_t> frequencies(ids.size(), static_cast<std::uint8_t>(version));
    log.append(ids, [&](std::size_t i, std::uint8_t* payload) {
      std::memcpy(payload, &version, 4);
      for (std::size_t b = 4; b < width; ++b) payload[b] = byte_of(ids[i], version, b);
    }, frequencies, stream, false);
  }
  std::uint32_t check(std::int64_t id, const std::uint8_t* payload) const {
    std::uint32_t version;
    std::memcpy(&version, payload, 4);
    for (std::size_t b = 4; b < width; ++b) CHECK(payload[b] == byte_of(id, version, b));
    return version;
  }
  void drain() {
    while (const auto chunk = log.next_chunk()) {
      if (!fds.contains(chunk->segment)) {
        std::string name = (std::filesystem::temp_directory_path() / "log_test_XXXXXX").string();
        const int fd = ::mkstemp(name.data());
        CHECK(fd >= 0 && ::unlink(name.c_str()) == 0);
        fds[chunk->segment] = fd;
        log.attach(chunk->segment, fd);
      }
      CHECK(reinterpret_cast<std::uintptr_t>(chunk->bytes.data()) % kPage == 0 && chunk->num_bytes % kPage == 0);
      CHECK(::pwrite(fds[chunk->segment], chunk->bytes.data(), static_cast<std::size_t>(chunk->num_bytes), chunk->offset) ==
            chunk->num_bytes);
      log.written(chunk);
    }
  }
  // Moves what is live in the oldest segments to the other stream, and closes their files.
  void collect(int most) {
    log.seal();
    drain();
    for (const auto& use : log.segments()) {
      if (!use.is_sealed || most-- == 0) return;
      const auto stride = static_cast<std::size_t>(log.stride());
      std::vector<std::uint8_t> frames(static_cast<std::size_t>(use.num_records) * stride);
      CHECK(::pread(fds[use.number], frames.data(), frames.size(), kSegmentHeaderBytes) == static_cast<ssize_t>(frames.size()));
      CHECK(log.rewrite(use.number, log.keys(use.number), frames, 0, 1, 1) == use.num_live);
      log.detach(use.number);  // waits for reads that were planned before
      log.forget(use.number);
      ::close(fds[use.number]);
      fds.erase(use.number);
    }
  }
};

// Threads that read what others write: every row is whole, and never older than what was there when it was asked for.
void rows_survive_everything(const std::string& kind, std::int64_t width, std::int64_t num_rows) {
  Store open(width, 0), vocabulary(width + 9, num_rows);
  Store* const stores[] = {&open, &vocabulary};
  PageReader reader(kind, 24);
  std::vector<std::int64_t> ids(static_cast<std::size_t>(num_rows));
  for (std::int64_t i = 0; i < num_rows; ++i) ids[static_cast<std::size_t>(i)] = i;
  for (Store* store : stores) store->write(ids, 0);
  std::atomic<std::uint32_t> newest{0};
  std::atomic<bool> is_over{false};
  std::vector<std::thread> readers;
  for (std::uint64_t number = 0; number < 2; ++number) {
    readers.emplace_back([&, number] {
      Random random(number);
      while (!is_over) {
        const std::uint32_t since = newest;
        // One job over both logs: positions of the second follow those of the first.
        constexpr std::uint32_t kRows = 150;
        std::vector<std::int64_t> asked(2 * kRows);
        std::vector<std::uint32_t> positions(2 * kRows);
        std::vector<std::uint8_t> frequencies(2 * kRows);
        std::vector<RowAt> locations(2 * kRows);
        std::vector<std::atomic<int>> delivered(2 * kRows);
        for (std::uint32_t i = 0; i < 2 * kRows; ++i) {
          asked[i] = static_cast<std::int64_t>(random.below(static_cast<std::uint64_t>(num_rows)));
          positions[i] = i;
        }
        const Deliver deliver = [&](std::uint32_t position, const std::uint8_t* payload) {
          CHECK(stores[position / kRows]->check(asked[position], payload) >= since);
          CHECK(delivered[position].fetch_add(1) == 0);
        };
        ReadPlan plan;
        for (std::uint32_t s = 0; s < 2; ++s) {
          const auto part = [s](auto& all) { return std::span(all).subspan(s * kRows, kRows); };
          stores[s]->log.plan_reads(part(asked), part(positions), s, plan, deliver, part(locations), part(frequencies));
        }
        const auto job = reader.submit(std::move(plan), deliver, random.below(2) == 0);
        CHECK(!job->wait() && job->is_done() && !job->wait());
        for (std::uint32_t i = 0; i < 2 * kRows; ++i) CHECK(locations[i] != RowAt::nowhere && delivered[i] == 1);
      }
    });
  }
  Random random(99);
  for (std::uint32_t version = 1; version < 12; ++version) {
    for (Store* store : stores) {
      store->write(ids, version);
      store->drain();
      if (version % 3 == 0) store->collect(static_cast<int>(random.below(20)));
    }
    newest = version;
  }
  is_over = true;
  for (auto& thread : readers) thread.join();
  const auto counts = reader.counts();
  CHECK(counts.rows > 0 && counts.reads <= counts.pages && counts.busy_seconds > 0.0);
}

// Another log's fault does not hide a lower one, and jobs of nothing are done at once.
void faults_name_their_log(const std::string& kind) {
  Store a(100, 0), b(100, 0);
  PageReader reader(kind, 2);
  CHECK(reader.submit({}, nullptr, true)->is_done());
  const std::vector<std::int64_t> ids{1, 2, 3};
  for (Store* store : {&a, &b}) {
    store->write(ids, 5);
    store->log.seal();
    store->drain();
    const std::uint8_t zero = 0;
    CHECK(::pwrite(store->fds[1], &zero, 1, static_cast<off_t>(kSegmentHeaderBytes + 16)) == 1);
  }
  const std::vector<std::uint32_t> positions{0, 1, 2};
  std::vector<RowAt> locations(3);
  std::atomic<int> num_delivered{0};
  const Deliver deliver = [&](std::uint32_t, const std::uint8_t*) { ++num_delivered; };
  ReadPlan plan;
  b.log.plan_reads(ids, positions, 1, plan, deliver, locations, {});
  a.log.plan_reads(ids, positions, 0, plan, deliver, locations, {});
  const auto fault = reader.submit(std::move(plan), deliver, true)->wait();
  CHECK(fault && fault->source == 0 && fault->place == std::int64_t{1} << 32);
  CHECK(fault->kind == ReadFault::Kind::checksum && num_delivered == 4);
}

// Of rows that were asked for in one read, only those on a page that cannot be read are at fault. A hole in this process's
// memory is such a page, where the system lets its low addresses be mapped.
void a_bad_page_spoils_only_its_rows(const std::string& kind) {
  constexpr std::uintptr_t kBase = 16 * kPage;  // 65536, the lowest address that may be mapped
  const int fd = ::open("/proc/self/mem", O_RDONLY);
  void* const low = ::mmap(reinterpret_cast<void*>(kBase), 3 * kPage, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
  if (fd < 0 || low != reinterpret_cast<void*>(kBase)) {
    std::printf("not tested here: a page that cannot be read\n");
    if (low != MAP_FAILED) ::munmap(low, 3 * kPage);
    return;
  }
  constexpr std::size_t kStride = 48;
  constexpr std::uint32_t kFirst = (kBase - kSegmentHeaderBytes) / kStride + 1;  // the first record that begins there
  ReadPlan plan;
  plan.files.push_back({FileUse(std::make_shared<SegmentFile>(fd)), 1, kStride, 0});
  for (const std::uint32_t record : {kFirst, kFirst + 90, kFirst + 100, kFirst + 180}) {
    auto* frame = reinterpret_cast<std::uint8_t*>(frame_offset(record, kStride));
    const std::int64_t id = record;
    const std::vector<std::uint8_t> bytes(kStride - kFrameHeadBytes, 7);
    frame_records(&id, bytes.data(), 1, bytes.size(), std::uint64_t{1} << 32 | record, frame);
    plan.items.push_back({0, record, record - kFirst, id});
  }
  ::munmap(low, kPage);
  PageReader reader(kind, 4);
  std::atomic<int> num_delivered{0};
  const auto job = reader.submit(std::move(plan), [&](std::uint32_t position, const std::uint8_t*) {
    CHECK(position >= 90);
    ++num_delivered;
  }, true);
  const auto fault = job->wait();
  CHECK(fault && fault->kind == ReadFault::Kind::system && fault->place == (std::int64_t{1} << 32 | kFirst));
  CHECK(fault->error == EIO && num_delivered == 3 && reader.counts().reads == 1);
  ::munmap(reinterpret_cast<void*>(kBase + kPage), 2 * kPage);
  ::close(fd);
}

void pages_are_read_once_and_small_gaps_through() {
  std::vector<ReadPlan::File> files;
  for (std::int64_t segment : {1, 2}) {
    files.push_back({FileUse(std::make_shared<SegmentFile>(-1)), segment, 48, 0});
  }
  const auto runs_of = [&](std::vector<ReadPlan::Item> items) { return plan_runs(items, files); };
  // Rows of one page, one of them twice; then one that crosses into the next page.
  auto runs = runs_of({{0, 0, 0, 7}, {0, 3, 1, 8}, {0, 3, 2, 8}, {0, 84, 3, 9}});
  CHECK(runs.size() == 1 && runs[0].offset == 0 && runs[0].bytes == 2 * kPage && runs[0].last == 4);
  // Record 340 lies at 16384, behind three pages that nobody wants; 427 at 20560, behind four.
  CHECK(runs_of({{0, 0, 0, 7}, {0, 340, 1, 8}}).size() == 1);
  CHECK(runs_of({{0, 0, 0, 7}, {0, 427, 1, 8}}).size() == 2);
  CHECK(runs_of({{0, 0, 0, 7}, {1, 0, 1, 8}}).size() == 2);
  // A run is bounded, whatever is wanted; and all of it is read.
  std::vector<ReadPlan::Item> all;
  for (std::uint32_t record = 0; record < 10'000; ++record) all.push_back({0, record, record, 0});
  runs = runs_of(all);
  std::uint64_t end = 0;
  std::uint32_t next = 0;
  for (const ReadRun& run : runs) {
    CHECK(run.bytes <= kMaxRunBytes && run.bytes % kPage == 0 && run.offset % kPage == 0 && run.first == next);
    CHECK(run.offset <= frame_offset(run.first, 48) && frame_offset(run.last - 1, 48) + 48 <= run.offset + run.bytes);
    next = run.last;
    end = run.offset + run.bytes;
  }
  CHECK(next == 10'000 && end >= frame_offset(10'000, 48) && runs.size() <= 9);
}

// Of 10^9 rows that a table may have, few are stored.
void a_billion_rows_cost_address_space() {
  RowLog log({.record_bytes = 16, .rows = 1'000'000'000, .num_owners = 1, .segment_bytes = 1 << 20, .chunk_bytes = kPage});
  const std::vector<std::int64_t> ids{999'999'999, 0, 123'456'789};
  log.append(ids, [](std::size_t i, std::uint8_t* payload) { payload[0] = static_cast<std::uint8_t>(i); }, {}, 0, false);
  CHECK(log.num_rows() == 3 && log.index_bytes() < 100'000);
  CHECK_THROWS(log.erase(std::vector<std::int64_t>{1'000'000'000}), std::out_of_range, "id 1000000000");
  CHECK(log.erase(ids) == 3 && log.num_rows() == 0);
}

}  // namespace

int main() {
  pages_are_read_once_and_small_gaps_through();
  a_billion_rows_cost_address_space();
  for (const std::string kind : {"threads", "auto"}) {
    faults_name_their_log(kind);
    a_bad_page_spoils_only_its_rows(kind);
    rows_survive_everything(kind, 60, 3'000);
    rows_survive_everything(kind, 4'000, 150);
  }
}
