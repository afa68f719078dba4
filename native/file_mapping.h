// Read-only mappings of files that survive truncation: a load beyond the end of a shortened file sets a flag instead of
// killing the process.
#pragma once

#include <cstddef>
#include <cstdint>

namespace colonnade {

struct FileMapping {
  void* address = nullptr;
  int error = 0;  // errno if there is no mapping
};

// Map bytes [offset, offset + length) of an open file, followed by `room` writable bytes from the next page on. offset:
// a multiple of the page size. The file may be shorter, and may be closed while it is mapped. is_random: pages beside a
// missing one are not read with it.
FileMapping map_file(int fd, std::size_t offset, std::size_t length, std::size_t room, bool is_random = false) noexcept;
void unmap_file(void* address) noexcept;

// Return whether a load failed (SIGBUS: the file was shortened, or its disk cannot read it). After a failure all bytes
// of the file read as zeros, so discard results computed since the last call that returned false.
bool is_damaged(const void* address) noexcept;
// Return the number of failed mappings in this process.
std::uint64_t num_damaged() noexcept;

// Install this process's SIGBUS handler in front of handlers installed since; faults outside a mapping go to the
// previous handler. `map_file` does this too; call it again if other code installs handlers later.
void handle_faults() noexcept;

// Find blocks of a file that rows [0, num_rows) among `slots` touch and that `checked` does not mark, write each to
// `found` once, and return their number. Row r is at bytes [begin + r * stride, + stride) of the file.
std::size_t unchecked_blocks(const std::uint32_t* slots, std::size_t num_slots, std::uint64_t num_rows,
                             std::uint64_t begin, std::uint64_t stride, std::uint64_t block_bytes,
                             const std::uint8_t* checked, std::int64_t* unchecked, std::size_t room) noexcept;

}  // namespace colonnade
