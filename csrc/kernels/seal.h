// Checksums of a subgroup's state, verified before an update uses it and made when it has, block by block while the
// block is in the cache: read from memory for a checksum alone, a byte costs several times as much.
//
// Invariants: no element is updated whose block does not have the checksum of the seal that is expected; a seal that is
// complete has the checksum of every byte of every tensor, padding included; where a subgroup is cut depends on nothing
// but its size.
// Not done here: knowing which seal belongs to what was read (offload/engine/seals.py).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "jobs.h"

namespace offload {

// How much memory a stored tensor takes: items of so many elements, and padding up to `nbytes` after the last.
struct SealedSize {
  std::uint32_t item_bytes;
  std::uint32_t item_numel;
  std::uint64_t nbytes;

  bool operator==(const SealedSize& other) const {
    return item_bytes == other.item_bytes && item_numel == other.item_numel && nbytes == other.nbytes;
  }
};

// What one tensor of a subgroup's state is stored in.
struct SealedTensor {
  char* address;
  SealedSize size;
};

// Checksums of tensors of equal length, by blocks and by tiles.
//
// A tensor is cut into blocks of kBlockNumel elements, and into tiles, which are whole blocks. A run is the blocks of
// one piece of work in one tile: a thread works on them one after the other. What is kept for a block is the checksum
// of its run up to the end of this block. So that of a run's last block is the run's, and `complete` joins runs to
// tiles.
class Seal {
 public:
  // Tensors of `numel` elements, in tiles of `tile_numel` elements, of which the last may be shorter. A block is
  // whole items. Padding belongs to the last block.
  Seal(std::uint64_t numel, std::uint64_t tile_numel, std::vector<SealedSize> sizes);

  std::uint64_t blocks() const { return blocks_; }
  std::uint64_t tiles() const { return (numel_ + tile_numel_ - 1) / tile_numel_; }
  std::size_t tensors() const { return sizes_.size(); }
  std::uint64_t begin_of(std::uint64_t block) const { return block * kBlockNumel; }
  std::uint64_t end_of(std::uint64_t block) const { return std::min(numel_, (block + 1) * kBlockNumel); }
  std::uint64_t tile_of(std::uint64_t block) const { return begin_of(block) / tile_numel_; }
  bool cut_like(const Seal& other) const;

  // Make the checksum of a block, after those of the blocks before it in its run.
  void make(std::size_t tensor, std::uint64_t block, const char* address) noexcept {
    crcs_[tensor * blocks_ + block] = taken(tensor, block, address);
  }
  // Whether a block in memory has the checksum that was made for it. The blocks before it in its run are not read:
  // the checksum goes on from the one that was made for them.
  bool matches(std::size_t tensor, std::uint64_t block, const char* address) const noexcept {
    return crcs_[tensor * blocks_ + block] == taken(tensor, block, address);
  }

  // Join the checksums of runs to those of tiles, once all have been made.
  void complete() noexcept;
  std::uint32_t checksum(std::size_t tensor, std::uint64_t tile) const { return tiles_[tensor * tiles() + tile]; }

 private:
  bool begins_run(std::uint64_t block) const {
    return begin_of(block) % kPieceNumel == 0 || begin_of(block) % tile_numel_ == 0;
  }
  // Where a block begins in a tensor, and where it ends, the last one with the padding.
  std::uint64_t first_byte(std::size_t tensor, std::uint64_t block) const {
    return begin_of(block) / sizes_[tensor].item_numel * sizes_[tensor].item_bytes;
  }
  std::uint64_t end_byte(std::size_t tensor, std::uint64_t block) const {
    return block + 1 == blocks_ ? sizes_[tensor].nbytes : first_byte(tensor, block + 1);
  }
  // Checksum of a run up to the end of this block: that of the block before, continued with this one's bytes.
  std::uint32_t taken(std::size_t tensor, std::uint64_t block, const char* address) const noexcept;

  const std::uint64_t numel_;
  const std::uint64_t tile_numel_;
  const std::uint64_t blocks_;
  const std::vector<SealedSize> sizes_;
  std::vector<std::uint32_t> crcs_;   // by tensor, then block: of its run up to its end
  std::vector<std::uint32_t> tiles_;  // by tensor, then tile
};

// What a sealed update works on beside its table.
struct SealedState {
  std::vector<std::uint64_t> offsets;  // of each segment in each tensor, ascending
  std::vector<SealedTensor> tensors;
  std::uint64_t numel;
  std::uint64_t tile_numel;
  std::shared_ptr<const Seal> expected;  // what memory has to have; null where that is known to be right
};

// Updates the segments of a table, and seals the state that they lie in; reports to a queue, which must outlive it.
// A block that is not as expected ends it with kErrorChecksum and, as detail, tensor << 32 | tile.
class SealedTableJob final : public Job {
 public:
  // Throws std::invalid_argument where state and table do not fit, or `expected` is cut differently.
  SealedTableJob(std::vector<Segment> segments, SealedState state, TableJob::Kernel kernel, CompletionQueue& queue,
                 std::uint64_t op);

  // Complete once the job has ended well.
  const std::shared_ptr<Seal>& seal() const { return seal_; }

 protected:
  void run_piece(std::size_t piece) noexcept override;
  void finished(double started_s, double finished_s) noexcept override;

 private:
  // Whether all tensors' parts of a block are as expected; else note in `damaged_` which is not.
  bool verify(std::uint64_t block) noexcept;

  std::vector<Segment> segments_;
  const SealedState state_;
  const TableJob::Kernel kernel_;
  std::shared_ptr<Seal> seal_;
  std::atomic<std::int64_t> damaged_{-1};  // tensor << 32 | tile; -1 while all is as expected
  CompletionQueue& queue_;
  const std::uint64_t op_;
};

}  // namespace offload
