// The kernels as jobs: what to run, cut into pieces that are large enough to pay for being taken.
//
// Invariants: a table is copied when a job is made; cutting changes no number (blocks of the norm are never
// cut; elements of an update know nothing of each other). Pieces begin at multiples of 4096 elements of
// their segment, so that aligned tensors stay aligned.
// Not done here: keeping the memory that a table points at alive (the caller does, until the job ends).
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "../runtime/completion_queue.h"
#include "kernels.h"
#include "worker_pool.h"

namespace offload {

// Elements of a piece: 1.75 MiB of an update's traffic, under a millisecond, hundreds of times the cost of taking
// it; small enough that the last one keeps nobody waiting.
constexpr std::uint64_t kPieceNumel = 64 * 1024;

// Return what is wrong with a table ("segment 3: ..."), or an empty string. Sees nulls, alignment, unknown
// codes and impossible combinations; whether memory is there, it cannot see.
std::string check_table(const Segment* table, std::size_t rows);

// A run of work over a table: from unit `begin` of row `first` to unit `end` of row `last`. Rows between are whole.
struct Piece {
  std::uint32_t first, last;
  std::uint64_t begin, end;
};

// Cut rows of so many units each (elements, words) into pieces; many small rows make one piece.
std::vector<Piece> cut_rows(const std::vector<std::uint64_t>& units);

// Whether an update does anything to a segment.
inline bool is_touched(const Segment& segment) { return segment.flags & (kActive | kTakesMaster | kZeroState); }

// Order this thread's non-temporal stores before the release that ends a piece, which by itself does not wait for
// them: else whoever sees the job ended might read old values.
void drain_nontemporal_stores();

// Return the kernel that updates a range of a segment, and adds to the fingerprints that the segment's `read` asks for.
std::function<void(const Segment&, std::uint64_t, std::uint64_t)> update_of(const KernelSet& kernels);

// Updates the segments of a table; pieces may span many small segments.
class TableJob : public Job {
 public:
  using Kernel = std::function<void(const Segment&, std::uint64_t, std::uint64_t)>;

  TableJob(std::vector<Segment> segments, Kernel kernel) : TableJob(Cut(std::move(segments)), std::move(kernel)) {}

 protected:
  void run_piece(std::size_t piece) noexcept override;
  void finished(double, double) noexcept override {}

 private:
  // A table and its pieces, made first: the constructor of `Job` takes the number of pieces.
  struct Cut {
    explicit Cut(std::vector<Segment> table);
    std::vector<Segment> segments;
    std::vector<Piece> pieces;
  };

  TableJob(Cut cut, Kernel kernel);

  const Cut cut_;
  const Kernel kernel_;
};

// A TableJob that reports its end to a queue, which must outlive the job.
class ReportingTableJob final : public TableJob {
 public:
  ReportingTableJob(std::vector<Segment> segments, Kernel kernel, CompletionQueue& queue, std::uint64_t op)
      : TableJob(std::move(segments), std::move(kernel)), queue_(queue), op_(op) {}

 protected:
  void finished(double started_s, double finished_s) noexcept override {
    Completion completion;
    completion.op = op_;
    completion.started_s = started_s;
    completion.finished_s = finished_s;
    queue_.push(completion);
  }

 private:
  CompletionQueue& queue_;
  const std::uint64_t op_;
};

// Sums of squares of one gradient, and its copy or widening on the way.
struct GradientBlocks {
  const void* source;
  std::int32_t source_dtype;
  std::uint64_t numel;
  double* blocks;
  void* destination;
  std::int32_t destination_dtype;
};

// Return what is wrong with the arguments, or an empty string.
std::string check_gradient_blocks(const GradientBlocks& work);

class GradientBlocksJob final : public Job {
 public:
  GradientBlocksJob(const GradientBlocks& work, const KernelSet& kernels);

  // Once the job has ended: the fingerprint of the destination, or of the source where there is none.
  std::uint64_t fingerprint() const { return fingerprint_.load(std::memory_order_relaxed); }

 protected:
  void run_piece(std::size_t piece) noexcept override;
  void finished(double, double) noexcept override {}

 private:
  const GradientBlocks work_;
  const KernelSet& kernels_;
  std::atomic<std::uint64_t> fingerprint_{0};
};

// Fingerprints of many gradients; pieces may span many small ones.
class FingerprintsJob final : public Job {
 public:
  struct Range {
    const void* source;
    std::uint64_t nbytes;
  };

  FingerprintsJob(std::vector<Range> ranges, const KernelSet& kernels);

  // Once the job has ended: the fingerprint of a gradient.
  std::uint64_t fingerprint(std::size_t range) const { return found_[range].load(std::memory_order_relaxed); }

 protected:
  void run_piece(std::size_t piece) noexcept override;
  void finished(double, double) noexcept override {}

 private:
  FingerprintsJob(std::vector<Range> ranges, std::vector<Piece> pieces, const KernelSet& kernels);

  const std::vector<Range> ranges_;
  const std::vector<Piece> pieces_;
  const KernelSet& kernels_;
  std::vector<std::atomic<std::uint64_t>> found_;
};

// Adds gradients of one dtype to others; pieces may span many small ones.
class AddJob final : public Job {
 public:
  struct Row {
    char* target;
    const char* source;
    std::uint64_t numel;
  };

  AddJob(std::vector<Row> rows, std::int32_t dtype, const KernelSet& kernels);

 protected:
  void run_piece(std::size_t piece) noexcept override;
  void finished(double, double) noexcept override {}

 private:
  AddJob(std::vector<Row> rows, std::vector<Piece> pieces, std::int32_t dtype, const KernelSet& kernels);

  const std::vector<Row> rows_;
  const std::vector<Piece> pieces_;
  const std::int32_t dtype_;
  const KernelSet& kernels_;
};

// Add doubles one after the other, starting from zero.
double sum_in_order(const double* values, std::size_t count);

}  // namespace offload
