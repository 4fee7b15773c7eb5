// Turns versions into bytes and back. Shared blocks are written once and are shared again after reading. The host
// stores and numbers the leaves.
//
// The bytes are a sequence of records. Each record makes the next block, node or heap out of earlier ones: in full, or
// as an earlier one with a few places changed. Numbers have variable length: seven bits per byte, the low bits first.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "state/heap.h"

namespace turnwise::state {

// Thrown for bytes that `write_archive` did not write.
struct Damaged : std::runtime_error {
    using std::runtime_error::runtime_error;
};

class LeafWriter {
  public:
    // Numbers leaves from 0 in the order of the first calls. Equal leaves may share a number.
    virtual uint64_t number_of(Leaf* leaf) = 0;
    // True for a whole number of at most 60 bits; the archive holds `integer` instead of a leaf.
    virtual bool as_integer(Leaf* leaf, int64_t& integer) = 0;

  protected:
    ~LeafWriter() = default;
};

// The role of a leaf. The host can refuse a leaf that is not allowed in that role.
enum class Use : uint8_t {
    Value,     // a value in a container, or the root
    Key,       // a key of a dict
    Object,    // the object of an opaque node
    TupleType  // the class of a named tuple
};

// Its functions may throw anything. `read_archive` then frees what it has made.
class LeafReader {
  public:
    // Returns a borrowed reference; null if there is no such leaf, or if it is not allowed for that use.
    virtual Leaf* leaf(uint64_t number, Use use) = 0;
    // Returns a new reference.
    virtual Leaf* integer(int64_t value) = 0;
    // Also refuses, by throwing, a leaf that cannot be a key.
    virtual int64_t hash(Leaf* key) = 0;
    virtual bool equal(Leaf* key, Leaf* other) = 0;
    // Returns a borrowed reference to the host's rule for forking an opaque object.
    virtual Leaf* policy(Leaf* object) = 0;

  protected:
    ~LeafReader() = default;
};

// The heaps must be settled and hold no plain containers.
std::string write_archive(const std::vector<const Heap*>& heaps, LeafWriter& leaves);

struct Restored {
    std::vector<std::unique_ptr<Heap>> heaps;  // in the order of writing
    uint64_t leaves;                           // number of leaves that were used
};
// Checks every number, so that damaged bytes throw Damaged and cannot corrupt memory.
Restored read_archive(const uint8_t* bytes, size_t size, LeafReader& leaves);

// ---- the format
namespace archive {

constexpr uint8_t kFormat = 2;              // the first byte
constexpr unsigned kMaxHeight = 6;          // largest height of a regular tree
constexpr unsigned kMaxRelaxedHeight = 11;  // and of a relaxed one, whose blocks may be partly empty
// Follow the format at the start of the archive. Blocks are restored unchanged, so reader and writer must have the same
// block sizes.
constexpr size_t kBlockSizes[] = {Values::kLeaf, decltype(DictNode::entries)::kLeaf,
                                  decltype(TokensNode::tokens)::kLeaf, Heap::Table::kLeaf};

// The first byte of a record says what it makes.
enum Shape : uint8_t {
    Leaves,      // a block of items
    LeavesLike,  // a block of items that resembles an earlier one
    Inner,       // a block of blocks
    InnerLike    // a block of blocks that resembles an earlier one
};
enum ArrayType : uint8_t {
    OfValues,   // items of lists and tuples
    OfEntries,  // entries of dicts
    OfTokens,   // token ids
    OfPlaces    // places of heaps
};
constexpr uint8_t kBlock = 0;      // a block: kBlock + 4 ArrayType + Shape
constexpr uint8_t kNode = 16;      // a node: kNode + Kind
constexpr uint8_t kNodeLike = 24;  // a node that resembles an earlier one: kNodeLike + Kind
constexpr uint8_t kHeap = 32;      // a heap
// A relaxed block of values: the same as Inner and InnerLike. Its ends are not written, the reader computes them.
// Blocks below relaxed ones may have several positions, so the reader ignores the positions of all blocks of values.
constexpr uint8_t kRelaxed = 33;
constexpr uint8_t kRelaxedLike = 34;

// The two low bits of a value in the archive; the bits above them are the payload.
enum Tag : uint8_t {
    IsLeaf,     // 0: the next new leaf, else the number of an earlier leaf + 1
    IsSlot,     // a slot of the heap
    IsInteger,  // a whole number, zigzag encoded
    IsEmpty     // no value
};

template <class Array>
constexpr ArrayType type_of() {
    if constexpr (std::is_same_v<Array, Values>) return OfValues;
    if constexpr (std::is_same_v<Array, decltype(DictNode::entries)>) return OfEntries;
    if constexpr (std::is_same_v<Array, decltype(TokensNode::tokens)>) return OfTokens;
    return OfPlaces;
}

// 0, -1, 1, -2, ... as 0, 1, 2, 3, ...: numbers of small magnitude take few bytes.
inline uint64_t zigzag(int64_t number) noexcept {
    return (static_cast<uint64_t>(number) << 1) ^ static_cast<uint64_t>(number >> 63);
}
inline int64_t unzigzag(uint64_t number) noexcept {
    return static_cast<int64_t>(number >> 1) ^ -static_cast<int64_t>(number & 1);
}

}  // namespace archive
}  // namespace turnwise::state
