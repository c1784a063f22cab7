#include "seal.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "../io/crc32c.h"

namespace offload {

Seal::Seal(std::uint64_t numel, std::uint64_t tile_numel, std::vector<SealedSize> sizes)
    : numel_(numel),
      tile_numel_(tile_numel),
      blocks_((numel + kBlockNumel - 1) / kBlockNumel),
      sizes_(std::move(sizes)),
      crcs_(tensors() * blocks_),
      tiles_(tensors() * tiles()) {}

bool Seal::cut_like(const Seal& other) const {
  return numel_ == other.numel_ && tile_numel_ == other.tile_numel_ && sizes_ == other.sizes_;
}

std::uint32_t Seal::taken(std::size_t tensor, std::uint64_t block, const char* address) const noexcept {
  const std::uint32_t seed = begins_run(block) ? 0 : crcs_[tensor * blocks_ + block - 1];
  const std::uint64_t begin = first_byte(tensor, block);
  return crc32c(seed, address + begin, end_byte(tensor, block) - begin);
}

void Seal::complete() noexcept {
  for (std::size_t tensor = 0; tensor < tensors(); ++tensor) {
    // The checksum of a followed by b, of n bytes, is crc(a) * x^(8n) ^ crc(b), as in crc32c_combine.
    std::uint64_t known = 0;  // bytes whose power is known: most runs are equally long, and powers take long
    std::uint32_t power = 0;
    std::uint64_t run = 0;  // the first block of the run that ends before `block`
    for (std::uint64_t block = 1; block <= blocks_; ++block) {
      if (block != blocks_ && !begins_run(block)) continue;
      const std::uint64_t nbytes = end_byte(tensor, block - 1) - first_byte(tensor, run);
      if (nbytes != known) power = crc32c_detail::power_of_x(8 * nbytes);
      known = nbytes;
      std::uint32_t& tile = tiles_[tensor * tiles() + tile_of(run)];
      const std::uint32_t before = begin_of(run) % tile_numel_ == 0 ? 0 : tile;
      tile = crc32c_detail::multiply(power, before) ^ crcs_[tensor * blocks_ + block - 1];
      run = block;
    }
  }
}

SealedTableJob::SealedTableJob(std::vector<Segment> segments, SealedState state, TableJob::Kernel kernel,
                               CompletionQueue& queue, std::uint64_t op)
    : Job((state.numel + kPieceNumel - 1) / kPieceNumel),
      segments_(std::move(segments)),
      state_(std::move(state)),
      kernel_(std::move(kernel)),
      queue_(queue),
      op_(op) {
  if (state_.tile_numel == 0 || state_.tile_numel % kBlockNumel != 0)
    throw std::invalid_argument("tiles of a sealed update are not whole blocks");
  if (state_.offsets.size() != segments_.size()) throw std::invalid_argument("one offset is needed a segment");
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    segments_[i].flags |= kInBlocks;
    if (state_.offsets[i] < end) throw std::invalid_argument("segments are not in the order of their offsets");
    end = state_.offsets[i] + segments_[i].numel;
  }
  if (end > state_.numel) throw std::invalid_argument("segments are longer than the tensors that they lie in");
  std::vector<SealedSize> sizes;
  for (const SealedTensor& tensor : state_.tensors) {
    const SealedSize& size = tensor.size;
    if (size.item_numel == 0 || kBlockNumel % size.item_numel != 0)
      throw std::invalid_argument("blocks of a sealed update are not whole items");
    if (size.nbytes < (state_.numel + size.item_numel - 1) / size.item_numel * size.item_bytes)
      throw std::invalid_argument("a tensor of a sealed update has fewer bytes than its items");
    sizes.push_back(size);
  }
  seal_ = std::make_shared<Seal>(state_.numel, state_.tile_numel, std::move(sizes));
  if (state_.expected && !state_.expected->cut_like(*seal_))
    throw std::invalid_argument("the seal that is expected is of another subgroup");
}

bool SealedTableJob::verify(std::uint64_t block) noexcept {
  for (std::size_t tensor = 0; tensor < state_.tensors.size(); ++tensor) {
    if (state_.expected->matches(tensor, block, state_.tensors[tensor].address)) continue;
    const auto tile = static_cast<std::int64_t>(seal_->tile_of(block));
    damaged_.store(static_cast<std::int64_t>(tensor) << 32 | tile, std::memory_order_relaxed);
    return false;
  }
  return true;
}

// Block by block: verify it, update what segments have of it, and seal it. A piece ends at the first block that is
// not as expected; pieces that begin later do nothing.
void SealedTableJob::run_piece(std::size_t piece) noexcept {
  if (damaged_.load(std::memory_order_relaxed) >= 0) return;
  const std::uint64_t first = piece * kPieceNumel / kBlockNumel;
  const std::uint64_t last = std::min(seal_->blocks(), (piece + 1) * kPieceNumel / kBlockNumel);
  const auto& offsets = state_.offsets;
  std::size_t row = 0;
  if (!offsets.empty()) {  // the last segment that begins where the piece does, or before
    const auto after = std::upper_bound(offsets.begin(), offsets.end(), seal_->begin_of(first));
    row = static_cast<std::size_t>(std::max<std::ptrdiff_t>(0, after - offsets.begin() - 1));
  }
  for (std::uint64_t block = first; block < last; ++block) {
    if (state_.expected && !verify(block)) break;  // the stores before it are drained, too
    const std::uint64_t begin = seal_->begin_of(block), end = seal_->end_of(block);
    for (; row < segments_.size() && offsets[row] < end; ++row) {
      const Segment& segment = segments_[row];
      const std::uint64_t last_of_row = offsets[row] + segment.numel;
      const std::uint64_t from = std::max(begin, offsets[row]), to = std::min(end, last_of_row);
      if (from < to && is_touched(segment)) kernel_(segment, from - offsets[row], to - offsets[row]);
      if (last_of_row > end) break;  // the next block goes on with it
    }
    for (std::size_t tensor = 0; tensor < state_.tensors.size(); ++tensor)
      seal_->make(tensor, block, state_.tensors[tensor].address);
  }
  drain_nontemporal_stores();
}

void SealedTableJob::finished(double started_s, double finished_s) noexcept {
  const std::int64_t damaged = damaged_.load(std::memory_order_relaxed);
  Completion completion;
  completion.op = op_;
  completion.started_s = started_s;
  completion.finished_s = finished_s;
  if (damaged < 0) {
    seal_->complete();
  } else {
    completion.error = kErrorChecksum;
    completion.detail = static_cast<std::uint64_t>(damaged);
  }
  queue_.push(completion);
}

}  // namespace offload
