#include "core/parallel.h"

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace turnwise {
namespace {

constexpr int kSpins = 4000;  // some 20 microseconds: longer than the gap between two passes of one op

struct Job {
    Job(int parts, const std::function<void(int)>& body) : parts(parts), body(body), left(parts) {}

    void work() {
        for (int part = next.fetch_add(1); part < parts; part = next.fetch_add(1)) {
            body(part);
            left.fetch_sub(1, std::memory_order_release);
        }
    }
    bool done() const { return left.load(std::memory_order_acquire) == 0; }

    const int parts;
    const std::function<void(int)>& body;  // alive until done(): the caller waits for that
    std::atomic<int> next{0};
    std::atomic<int> left;
};

class Pool {
  public:
    void run(int parts, const std::function<void(int)>& body) {
        auto job = std::make_shared<Job>(parts, body);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            while (int(workers_.size()) < parts - 1) {
                workers_.emplace_back([this] { serve(); });
                workers_.back().detach();
            }
            job_ = job;
            generation_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        job->work();
        for (int spins = 0; !job->done(); ++spins) {
            if (spins > kSpins) std::this_thread::yield();
        }
    }

    std::mutex busy;  // held by the one caller that may use the workers

  private:
    void serve() {
        uint64_t seen = 0;
        for (;;) {
            for (int spins = 0; spins < kSpins && generation_.load(std::memory_order_acquire) == seen; ++spins) {
            }
            std::shared_ptr<Job> job;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                wake_.wait(lock, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                seen = generation_.load(std::memory_order_relaxed);
                job = job_;
            }
            job->work();
        }
    }

    std::mutex mutex_;
    std::condition_variable wake_;
    std::shared_ptr<Job> job_;
    std::atomic<uint64_t> generation_{0};
    std::vector<std::thread> workers_;
};

// Never destroyed, since its threads may outlive static destructors; a forked child has no threads and needs its own.
Pool& pool() {
    static std::mutex mutex;
    static Pool* instance = nullptr;
    static pid_t owner = 0;
    std::lock_guard<std::mutex> lock(mutex);
    if (instance == nullptr || owner != getpid()) {
        instance = new Pool;
        owner = getpid();
    }
    return *instance;
}

}  // namespace

void run_parts(int parts, const std::function<void(int)>& body) {
    if (parts > 1) {
        Pool& workers = pool();
        std::unique_lock<std::mutex> lock(workers.busy, std::try_to_lock);
        if (lock.owns_lock()) {
            workers.run(parts, body);
            return;
        }
    }
    for (int part = 0; part < parts; ++part) body(part);
}

}  // namespace turnwise
