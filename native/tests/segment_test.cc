#include "../segment_reader.h"

#include <filesystem>
#include <string>
#include <unistd.h>

#include "check.h"

using namespace colonnade;

namespace {

constexpr std::int64_t kSegment = 7;
constexpr std::int64_t kFirstPlace = kSegment << 32;
constexpr std::size_t kNumRecords = 3'000;

// A segment file that vanishes with its descriptor, and what was written to it.
struct Written {
  std::size_t width;
  std::vector<std::int64_t> ids;
  std::vector<std::uint8_t> records, frames;
  std::int32_t fd;

  explicit Written(std::size_t record_bytes) : width(record_bytes), ids(kNumRecords), records(kNumRecords * width) {
    Random random(width);
    for (auto& id : ids) id = static_cast<std::int64_t>(random.next());
    for (auto& byte : records) byte = static_cast<std::uint8_t>(random.next());
    frames.resize(kNumRecords * frame_stride(width));
    frame_records(ids.data(), records.data(), kNumRecords, width, kFirstPlace, frames.data());
    std::string name = (std::filesystem::temp_directory_path() / "segment_test_XXXXXX").string();
    fd = ::mkstemp(name.data());
    CHECK(fd >= 0 && ::unlink(name.c_str()) == 0);
    CHECK(::pwrite(fd, frames.data(), frames.size(), kSegmentHeaderBytes) == static_cast<ssize_t>(frames.size()));
  }
  ~Written() { ::close(fd); }
  Written(const Written&) = delete;

  ReadRequest request(const std::vector<std::int64_t>& asked, const std::vector<std::int64_t>& places,
                      std::vector<std::uint8_t>& out) const {
    return {asked.data(), places.data(), out.data(), asked.size(), width, &kSegment, &fd, 1};
  }
};

void every_flipped_bit_is_found(std::size_t width) {
  Written written(width);
  auto& frames = written.frames;
  CHECK(check_records(frames.data(), kNumRecords, width, kFirstPlace) == -1);
  CHECK(check_records(frames.data(), kNumRecords, width, kFirstPlace + 1) == 0);  // whole, but elsewhere
  const std::size_t stride = frame_stride(width);
  for (std::size_t byte = 0; byte < 3 * stride; ++byte) {
    for (int bit = 0; bit < 8; ++bit) {
      frames[byte] ^= static_cast<std::uint8_t>(1 << bit);
      CHECK(check_records(frames.data(), 5, width, kFirstPlace) == static_cast<std::int64_t>(byte / stride));
      frames[byte] ^= static_cast<std::uint8_t>(1 << bit);
    }
  }
}

void threads_read_what_was_written(std::size_t width) {
  Written written(width);
  SegmentReader reader(3);
  std::vector<std::thread> callers;
  for (std::uint64_t caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&, caller] {
      Random random(caller);
      for (int round = 0; round < 10; ++round) {
        const std::size_t n = random.below(1'500);
        std::vector<std::int64_t> ids(n), places(n);
        std::vector<std::size_t> sources(n);
        for (std::size_t i = 0; i < n; ++i) {
          sources[i] = random.below(kNumRecords);
          ids[i] = written.ids[sources[i]];
          places[i] = kFirstPlace + static_cast<std::int64_t>(sources[i]);
          if (random.below(8) == 0) places[i] = random.below(2) == 0 ? -1 : places[i] | kTombstonePlace;
        }
        std::vector<std::uint8_t> out(n * width, 0xa5);
        const auto job = reader.read(written.request(ids, places, out));
        CHECK(!job->wait() && !job->wait());
        for (std::size_t i = 0; i < n; ++i) {
          const bool is_row = places[i] >= 0 && places[i] < kTombstonePlace;
          for (std::size_t b = 0; b < width; ++b) {
            CHECK(out[i * width + b] == (is_row ? written.records[sources[i] * width + b] : 0xa5));
          }
        }
      }
    });
  }
  for (auto& caller : callers) caller.join();
}

void faults_are_told_and_named(std::size_t width) {
  Written written(width);
  SegmentReader reader(2);
  std::vector<std::uint8_t> out(3 * width, 0xa5);
  const auto fault_of = [&](std::int64_t place, std::size_t id_of) {
    const std::vector<std::int64_t> ids{written.ids[0], written.ids[id_of], written.ids[2]};
    const std::vector<std::int64_t> places{kFirstPlace, place, kFirstPlace + 2};
    const auto fault = reader.read(written.request(ids, places, out))->wait();
    CHECK(fault && fault->place == place);
    return fault->kind;
  };
  using Kind = ReadFault::Kind;
  CHECK(fault_of(kFirstPlace + 1, 9) == Kind::other_id);
  CHECK(fault_of(kFirstPlace + kNumRecords, 1) == Kind::truncated);
  CHECK(fault_of((kSegment + 1) << 32, 1) == Kind::system);
  const std::uint8_t flipped = written.frames[frame_stride(width) + 20] ^ 4;
  CHECK(::pwrite(written.fd, &flipped, 1, static_cast<off_t>(kSegmentHeaderBytes + frame_stride(width) + 20)) == 1);
  CHECK(fault_of(kFirstPlace + 1, 1) == Kind::checksum);
  for (std::size_t b = 0; b < width; ++b) CHECK(out[width + b] == 0xa5);
}

}  // namespace

int main() {
  for (const std::size_t width : {9, 16, 72, 1024}) {
    every_flipped_bit_is_found(width);
    threads_read_what_was_written(width);
    faults_are_told_and_named(width);
  }
  CHECK_THROWS(SegmentReader(0), std::invalid_argument, "num_threads");
}
