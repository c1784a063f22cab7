// Threads that run jobs cut into numbered pieces.
//
// Invariants: each piece of a job runs exactly once, on one worker, in the default floating-point
// environment; `finished` is called once, by the worker that ends the last piece; jobs start in the order
// they were given, and a worker that finds no piece left in one goes on to the next. Nothing on a worker
// throws. Numbers never depend on how many workers there are.
// Not done here: cutting work into pieces, dependencies between jobs, priorities.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

// Work in numbered pieces. Only a pool calls what is protected.
class Job {
 public:
  explicit Job(std::size_t pieces) : pieces_(pieces) {}
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  std::size_t pieces() const { return pieces_; }

 protected:
  virtual void run_piece(std::size_t piece) noexcept = 0;
  // Called once all pieces have run; what they wrote is visible to this thread. CLOCK_MONOTONIC seconds: when the
  // first piece was taken, and when the last one ended.
  virtual void finished(double started_s, double finished_s) noexcept = 0;

 private:
  friend class WorkerPool;
  const std::size_t pieces_;
  std::atomic<std::size_t> next_{0};  // the next piece to take
  std::atomic<std::size_t> done_{0};  // pieces that have ended
  double started_s_ = 0.0;  // written by whoever takes piece 0
};

class WorkerPool {
 public:
  // Start `threads` workers (at least 1). They take no signals: those are for the interpreter's threads.
  explicit WorkerPool(unsigned threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  unsigned threads() const { return threads_; }

  // Give a job to the workers and return. A job without pieces ends here and now. Throws
  // std::logic_error after close, and in a forked child (which has no workers). Any thread.
  void submit(std::shared_ptr<Job> job);

  // Run a job that lives on the caller's stack and wait for it. A job of one piece runs on the caller,
  // because waking a worker takes longer than most of them. Throws as submit does.
  void run(Job& job);

  // Wait for all jobs and end the workers; idempotent. Any thread but a worker. In a forked child, where
  // the workers do not exist, it only forgets them.
  void close();

 private:
  struct State;
  std::unique_lock<std::mutex> lock_open();  // throws unless jobs may be given

  const unsigned threads_;
  const pid_t pid_;
  std::shared_ptr<State> state_;
  std::mutex closing_;
  std::vector<std::thread> workers_;
};

}  // namespace offload
