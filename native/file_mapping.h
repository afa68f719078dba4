// Files as read-only memory that survives its file: a load beyond a file that was cut short is a flag, not the end of
// the process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colonnade {

struct FileMapping {
  void* address = nullptr;
  int error = 0;  // errno where there is no mapping
};

// Bytes [offset, offset + length) of an open file, then `room` bytes that are writable memory, at neighbouring
// addresses: the room begins with the page behind the file's last one. offset: a multiple of the page size. The file
// may be shorter than that; it may also be closed meanwhile.
FileMapping map_file(int fd, std::size_t offset, std::size_t length, std::size_t room) noexcept;
void unmap_file(void* address) noexcept;

// Whether a load failed (SIGBUS: the file was cut short, or its disk cannot read it). From then on all of the file's
// bytes read as zeros, so whatever was computed since the last call that said false is void.
bool is_damaged(const void* address) noexcept;
// How many times that happened in this process.
std::uint64_t num_damaged() noexcept;

// Makes this process's handler of SIGBUS ours, before whatever others have installed since; faults that are not of a
// mapping go to the one that was there. `map_file` does that; again is worth it where others install handlers later.
void handle_faults() noexcept;

// Blocks of a file that rows [0, num_rows) of those `slots` touch and that `checked` does not say were checked, each
// written to `found` once; returns how many. Row r lies at bytes [begin + r * stride, + stride) of the file.
std::size_t unchecked_blocks(const std::uint32_t* slots, std::size_t num_slots, std::uint64_t num_rows,
                             std::uint64_t begin, std::uint64_t stride, std::uint64_t block_bytes,
                             const std::uint8_t* checked, std::int64_t* found, std::size_t room) noexcept;

}  // namespace colonnade
