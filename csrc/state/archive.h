// Versions as bytes, and back. Shared blocks are written once and are shared again after reading. The host stores and
// numbers the leaves.
//
// The bytes are a program of records, each making the next block, node or heap out of earlier ones: whole, or as an
// earlier one with a few places changed. Numbers are of variable length (seven bits per byte, low ones first).
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "state/heap.h"

namespace turnwise::state {

// The bytes are not what `write_archive` writes.
struct Damaged : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class LeafWriter {
  public:
    // Leaves are numbered in the order in which they are first asked for; equal ones may have one number.
    virtual uint64_t number_of(Leaf* leaf) = 0;
    // Whole numbers of at most 60 bits need no leaf.
    virtual bool as_integer(Leaf* leaf, int64_t& integer) = 0;

  protected:
    ~LeafWriter() = default;
};

// The role of a leaf, so that the host can refuse a leaf that must not have it.
enum class Use : uint8_t { Value, Key, Object, TupleType };

// Its functions may throw what they like: `read_archive` then leaves nothing behind.
class LeafReader {
  public:
    // A borrowed reference; null if there is no such leaf, or none for that use.
    virtual Leaf* leaf(uint64_t number, Use use) = 0;
    // A new reference.
    virtual Leaf* integer(int64_t value) = 0;
    virtual int64_t hash(Leaf* key) = 0;
    // How forks treat an opaque object: a reference that is borrowed from the host.
    virtual Leaf* policy(Leaf* object) = 0;

  protected:
    ~LeafReader() = default;
};

// The heaps must be settled and hold no plain containers.
std::string write_archive(const std::vector<const Heap*>& heaps, LeafWriter& leaves);

struct Restored {
    std::vector<std::unique_ptr<Heap>> heaps;
    uint64_t leaves;  // how many were used
};
// Every number is checked: damaged bytes raise Damaged and never harm.
Restored read_archive(const uint8_t* bytes, size_t size, LeafReader& leaves);

// ---- the format
namespace archive {

constexpr uint8_t kFormat = 1;
constexpr unsigned kMaxHeight = 6;
// Stand at the head, behind the format: blocks are read as they were, so they must be of the same size.
constexpr size_t kBlockSizes[] = {Values::kLeaf, decltype(DictNode::entries)::kLeaf,
                                  decltype(TokensNode::tokens)::kLeaf, Heap::Table::kLeaf};

// Records: an array type times these four, then the nodes by kind, anew or like an earlier one, and a heap.
enum Shape : uint8_t { Leaves, LeavesLike, Inner, InnerLike };
enum ArrayType : uint8_t { OfValues, OfEntries, OfTokens, OfPlaces };
constexpr uint8_t kBlock = 0;
constexpr uint8_t kNode = 16;
constexpr uint8_t kNodeLike = 24;
constexpr uint8_t kHeap = 32;

// The two low bits of a value in the archive.
enum Tag : uint8_t { IsLeaf, IsSlot, IsInteger, IsEmpty };

template <class Array>
constexpr ArrayType type_of() {
    if constexpr (std::is_same_v<Array, Values>) return OfValues;
    if constexpr (std::is_same_v<Array, decltype(DictNode::entries)>) return OfEntries;
    if constexpr (std::is_same_v<Array, decltype(TokensNode::tokens)>) return OfTokens;
    return OfPlaces;
}

inline uint64_t zigzag(int64_t number) noexcept {
    return (static_cast<uint64_t>(number) << 1) ^ static_cast<uint64_t>(number >> 63);
}
inline int64_t unzigzag(uint64_t number) noexcept {
    return static_cast<int64_t>(number >> 1) ^ -static_cast<int64_t>(number & 1);
}

}  // namespace archive
}  // namespace turnwise::state
