#include "jobs.h"

#include "rules.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace offload {
namespace {

// What a row costs beside its units, in units: a call, a switch, cold lines.
constexpr std::uint64_t kRowCost = 64;

std::size_t size_of_dtype(std::int32_t dtype) { return dtype == kFloat32 ? 4 : 2; }

// Return what is wrong with a segment, or an empty string. If there is nothing to do to it, only flags are checked.
std::string check_segment(const Segment& s) {
  if (s.flags & ~static_cast<std::uint32_t>(kAllFlags)) return "unknown flags " + std::to_string(s.flags);
  const bool active = s.flags & kActive;
  const bool takes = s.flags & kTakesMaster;
  const bool zeroes = s.flags & kZeroState;
  if (s.numel == 0 || !(active || takes || zeroes)) return "";
  const int states = with_rule(s.rule, -1, [](auto rule) { return decltype(rule)::kStates; });
  if (states < 0) return "unknown rule " + std::to_string(s.rule);
  if (s.weight != 0 && s.weight_dtype != kBfloat16 && s.weight_dtype != kFloat16)
    return "weight_dtype " + std::to_string(s.weight_dtype) +
           " is not a 16-bit type (an fp32 weight is the master: weight must be 0)";
  if (s.weight == 0 && s.weight_dtype != kFloat32 && s.weight_dtype != kNone)
    return "weight is null but weight_dtype is " + std::to_string(s.weight_dtype);
  if (s.weight % 2 || s.new_weight % 2) return "weight is not aligned to 2 bytes";
  if (s.new_weight != 0 && s.weight == 0) return "new_weight is given but weight is null";
  if ((active || takes) && s.master == 0) return "master is null";
  const FormatFacts facts = format_facts(s);
  if (facts.state_bytes == 0) return "unknown state_format " + std::to_string(s.state_format);
  const std::size_t master_bytes = s.weight != 0 ? facts.master_bytes : 4;
  std::uint64_t state_addresses = 0;
  for (int k = 0; k < states; ++k) {
    if ((active || zeroes) && s.state[k] == 0) return "state " + std::to_string(k) + " is null";
    state_addresses |= s.state[k];
  }
  if ((s.master | s.new_master) % master_bytes)
    return "master is not aligned to " + std::to_string(master_bytes) + " bytes";
  if (master_bytes != 4 && (active || takes) && s.master_low == 0) return "master_low is null";
  if (facts.block_numel > 1 && (active || zeroes) && s.scales == 0) return "scales is null";
  if (state_addresses % facts.state_bytes)
    return "state is not aligned to " + std::to_string(facts.state_bytes) + " bytes";
  if (active && s.gradient == 0) return "gradient is null";
  if (s.read % 8) return "read is not aligned to 8 bytes";
  if (s.read != 0 && s.first_index % facts.block_numel != 0)
    return "read is given for a segment that begins within a block";
  if (active && (s.gradient_dtype < kBfloat16 || s.gradient_dtype > kFloat32))
    return "gradient_dtype " + std::to_string(s.gradient_dtype) + " is not a dtype code";
  return "";
}

}  // namespace

void drain_nontemporal_stores() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

std::string check_table(const Segment* table, std::size_t rows) {
  if (rows > 0xffffffffu) return "more than 2^32 segments";
  for (std::size_t i = 0; i < rows; ++i) {
    const std::string problem = check_segment(table[i]);
    if (!problem.empty()) return "segment " + std::to_string(i) + ": " + problem;
  }
  return "";
}

std::vector<Piece> cut_rows(const std::vector<std::uint64_t>& units) {
  std::vector<Piece> pieces;
  Piece piece{0, 0, 0, 0};
  std::uint64_t cost = 0;  // of the piece being filled
  for (std::size_t i = 0; i < units.size(); ++i) {
    const std::uint32_t index = static_cast<std::uint32_t>(i);
    std::uint64_t taken = 0;
    while (taken < units[i]) {
      if (cost == 0) piece = Piece{index, index, taken, taken};
      cost += kRowCost;
      // A row is cut at multiples of 4096 only, so that the next piece starts as well aligned as this row does. Where
      // kRowCost has filled the piece, it takes 4096 all the same, so that every round takes something.
      const std::uint64_t room = cost < kPieceNumel ? (kPieceNumel - cost + 4095) / 4096 * 4096 : 4096;
      const std::uint64_t now = std::min(units[i] - taken, room);
      taken += now;
      cost += now;
      piece.last = index;
      piece.end = taken;
      if (cost >= kPieceNumel) {
        pieces.push_back(piece);
        cost = 0;
      }
    }
  }
  if (cost > 0) pieces.push_back(piece);
  return pieces;
}

namespace {

// Elements that `update_reading` copies at a time: both copies stay in the first-level cache.
constexpr std::uint64_t kReadNumel = 1024;

// Add to a sum that pieces on other threads add to as well.
void add_to(std::uint64_t address, std::uint64_t part) {
  auto* sum = reinterpret_cast<std::uint64_t*>(address);
  __atomic_fetch_add(sum, part, __ATOMIC_RELAXED);  // the job's end is what others wait for
}

// Update a range of a segment, and add to the sums at its `read` the fingerprints of what the update has read. Others
// may write to the gradient and to an fp32 weight meanwhile. So a few elements at a time are copied, and the update
// reads the copies: the fingerprint is that of the very same bytes.
void update_reading(const KernelSet& kernels, const Segment& segment, std::uint64_t begin, std::uint64_t end) {
  alignas(64) thread_local char gradients[4 * kReadNumel];
  alignas(64) thread_local char masters[4 * kReadNumel];
  const std::uint64_t item = size_of_dtype(segment.gradient_dtype);
  const bool reads_weight = segment.weight == 0 && segment.new_master != 0;
  std::uint64_t of_gradient = 0, of_weight = 0;
  for (std::uint64_t from = begin; from < end;) {
    // Up to the next multiple of kReadNumel, so that no block of elements that share scales is cut here: the segment
    // begins with one (`check_segment`).
    const std::uint64_t to = std::min(end, (from / kReadNumel + 1) * kReadNumel);
    // The same segment, but element `from` of the gradient, and of the master, is the first of the copy.
    Segment copied = segment;
    std::memcpy(gradients, reinterpret_cast<const char*>(segment.gradient) + from * item, (to - from) * item);
    of_gradient += kernels.fingerprint(gradients, (to - from) * item, from * item);
    copied.gradient = reinterpret_cast<std::uint64_t>(gradients) - from * item;
    if (reads_weight) {
      std::memcpy(masters, reinterpret_cast<const char*>(segment.master) + from * 4, (to - from) * 4);
      of_weight += kernels.fingerprint(masters, (to - from) * 4, from * 4);
      copied.master = reinterpret_cast<std::uint64_t>(masters) - from * 4;
    }
    kernels.update(copied, from, to);
    from = to;
  }
  add_to(segment.read, of_gradient);
  if (reads_weight) add_to(segment.read + 8, of_weight);
}

}  // namespace

TableJob::Kernel update_of(const KernelSet& kernels) {
  return [&kernels](const Segment& segment, std::uint64_t begin, std::uint64_t end) {
    if (segment.read != 0 && (segment.flags & kActive))
      update_reading(kernels, segment, begin, end);
    else
      kernels.update(segment, begin, end);
  };
}

TableJob::Cut::Cut(std::vector<Segment> table) : segments(std::move(table)) {
  std::vector<std::uint64_t> numels;
  numels.reserve(segments.size());
  for (const Segment& segment : segments) numels.push_back(is_touched(segment) ? segment.numel : 0);
  pieces = cut_rows(numels);
}

TableJob::TableJob(Cut cut, Kernel kernel) : Job(cut.pieces.size()), cut_(std::move(cut)), kernel_(std::move(kernel)) {}

void TableJob::run_piece(std::size_t index) noexcept {
  const Piece& piece = cut_.pieces[index];
  for (std::uint32_t i = piece.first; i <= piece.last; ++i) {
    const Segment& segment = cut_.segments[i];
    const std::uint64_t begin = i == piece.first ? piece.begin : 0;
    const std::uint64_t end = i == piece.last ? piece.end : segment.numel;
    if (begin < end) kernel_(segment, begin, end);
  }
  drain_nontemporal_stores();
}

std::string check_gradient_blocks(const GradientBlocks& work) {
  const auto is_dtype = [](std::int32_t dtype) { return dtype >= kBfloat16 && dtype <= kFloat32; };
  if (!is_dtype(work.source_dtype)) return "source_dtype " + std::to_string(work.source_dtype) + " is not a dtype code";
  if (work.numel == 0) return "";
  if (work.source == nullptr) return "source is null";
  if (work.blocks == nullptr || reinterpret_cast<std::uintptr_t>(work.blocks) % 8)
    return "blocks is null or not aligned to 8 bytes";
  if (work.destination == nullptr) return "";
  if (work.destination_dtype != work.source_dtype && work.destination_dtype != kFloat32)
    return "a gradient is copied as it is or widened to fp32, not converted from dtype " +
           std::to_string(work.source_dtype) + " to " + std::to_string(work.destination_dtype);
  const auto from = reinterpret_cast<std::uintptr_t>(work.source);
  const auto to = reinterpret_cast<std::uintptr_t>(work.destination);
  const bool same = from == to && work.destination_dtype == work.source_dtype;
  if (!same && from < to + work.numel * size_of_dtype(work.destination_dtype) &&
      to < from + work.numel * size_of_dtype(work.source_dtype))
    return "source and destination overlap";
  return "";
}

GradientBlocksJob::GradientBlocksJob(const GradientBlocks& work, const KernelSet& kernels)
    : Job((work.numel + kPieceNumel - 1) / kPieceNumel), work_(work), kernels_(kernels) {}

void GradientBlocksJob::run_piece(std::size_t piece) noexcept {
  const std::uint64_t begin = piece * kPieceNumel;
  const std::uint64_t numel = std::min(kPieceNumel, work_.numel - begin);
  char* destination = static_cast<char*>(work_.destination);
  const std::uint64_t part =
      kernels_.gradient_blocks(static_cast<const char*>(work_.source) + begin * size_of_dtype(work_.source_dtype),
                               work_.source_dtype, numel, work_.blocks + begin / kNormBlockNumel,
                               destination ? destination + begin * size_of_dtype(work_.destination_dtype) : nullptr,
                               work_.destination_dtype, begin);
  fingerprint_.fetch_add(part, std::memory_order_relaxed);  // the job's end is what others wait for
}

namespace {

std::vector<std::uint64_t> words_of(const std::vector<FingerprintsJob::Range>& ranges) {
  std::vector<std::uint64_t> words;
  words.reserve(ranges.size());
  for (const FingerprintsJob::Range& range : ranges) words.push_back((range.nbytes + 7) / 8);
  return words;
}

}  // namespace

FingerprintsJob::FingerprintsJob(std::vector<Range> ranges, const KernelSet& kernels)
    : FingerprintsJob(ranges, cut_rows(words_of(ranges)), kernels) {}

FingerprintsJob::FingerprintsJob(std::vector<Range> ranges, std::vector<Piece> pieces, const KernelSet& kernels)
    : Job(pieces.size()),
      ranges_(std::move(ranges)),
      pieces_(std::move(pieces)),
      kernels_(kernels),
      found_(ranges_.size()) {}

void FingerprintsJob::run_piece(std::size_t index) noexcept {
  const Piece& piece = pieces_[index];
  for (std::uint32_t i = piece.first; i <= piece.last; ++i) {
    const std::uint64_t begin = i == piece.first ? 8 * piece.begin : 0;
    const std::uint64_t end = i == piece.last ? std::min(8 * piece.end, ranges_[i].nbytes) : ranges_[i].nbytes;
    if (begin >= end) continue;
    const char* source = static_cast<const char*>(ranges_[i].source) + begin;
    found_[i].fetch_add(kernels_.fingerprint(source, end - begin, begin), std::memory_order_relaxed);
  }
}

namespace {

std::vector<std::uint64_t> numels_of(const std::vector<AddJob::Row>& rows) {
  std::vector<std::uint64_t> numels;
  numels.reserve(rows.size());
  for (const AddJob::Row& row : rows) numels.push_back(row.numel);
  return numels;
}

}  // namespace

AddJob::AddJob(std::vector<Row> rows, std::int32_t dtype, const KernelSet& kernels)
    : AddJob(rows, cut_rows(numels_of(rows)), dtype, kernels) {}

AddJob::AddJob(std::vector<Row> rows, std::vector<Piece> pieces, std::int32_t dtype, const KernelSet& kernels)
    : Job(pieces.size()), rows_(std::move(rows)), pieces_(std::move(pieces)), dtype_(dtype), kernels_(kernels) {}

void AddJob::run_piece(std::size_t index) noexcept {
  const Piece& piece = pieces_[index];
  for (std::uint32_t i = piece.first; i <= piece.last; ++i) {
    const Row& row = rows_[i];
    const std::uint64_t begin = i == piece.first ? piece.begin : 0;
    const std::uint64_t end = i == piece.last ? piece.end : row.numel;
    const std::size_t offset = begin * size_of_dtype(dtype_);
    if (begin < end) kernels_.add(row.target + offset, row.source + offset, dtype_, end - begin);
  }
}

double sum_in_order(const double* values, std::size_t count) {
  double total = 0.0;
  for (std::size_t i = 0; i < count; ++i) total = total + values[i];
  return total;
}

}  // namespace offload
