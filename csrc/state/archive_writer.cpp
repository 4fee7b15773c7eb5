#include <unordered_map>

#include "state/archive.h"

namespace turnwise::state {
namespace {

using namespace archive;

bool same_item(const Entry& a, const Entry& b) {
    return a.key == b.key && a.value == b.value;
}
bool same_item(const Place& a, const Place& b) {
    return a.word == b.word;
}
template <class Item>
bool same_item(const Item& a, const Item& b) {
    return a == b;
}

class Writer {
  public:
    explicit Writer(LeafWriter& leaves) : leaves_(leaves) {
        byte(kFormat);
        for (size_t size : kBlockSizes) number(size);
    }

    void add(const Heap& heap) {
        const uint64_t table = array(heap.table(), last_table_);
        byte(kHeap);
        number(table);
        put(heap.root());
        number(heap.first_free() == kNoSlot ? 0 : uint64_t{heap.first_free()} + 1);
        last_table_ = &heap.table();
    }
    std::string take() { return std::move(out_); }

  private:
    // ---- numbers and items
    void byte(unsigned value) { out_.push_back(static_cast<char>(value)); }
    void number(uint64_t value) {
        for (; value >= 128; value >>= 7) byte(static_cast<unsigned>(value & 127) | 128);
        byte(static_cast<unsigned>(value));
    }
    // Writes 0 for the next new leaf, else the number of an earlier leaf + 1.
    void put_leaf(Leaf* leaf) {
        const uint64_t known = leaves_.number_of(leaf);
        const bool is_new = known == leaf_count_;
        if (is_new) ++leaf_count_;
        number((is_new ? 0 : known + 1) << 2 | IsLeaf);
    }
    void put(Value value) {
        int64_t integer;
        if (value.is_slot())
            number(uint64_t{value.slot()} << 2 | IsSlot);
        else if (value.empty())
            number(IsEmpty);
        else if (leaves_.as_integer(value.leaf(), integer))
            number(zigzag(integer) << 2 | IsInteger);
        else
            put_leaf(value.leaf());
    }
    void put(const Entry& entry) {
        put(entry.key ? Value::of(entry.key) : Value());
        if (entry.key) put(entry.value);
    }
    void put(int32_t token) { number(zigzag(token)); }
    void put(const Place& place) {
        if (place.node()) {
            number((nodes_.size() - nodes_.at(place.node())) << 1);
        } else {
            number((place.next_free() == kNoSlot ? 0 : uint64_t{place.next_free()} + 1) << 1 | 1);
        }
    }

    // ---- arrays
    using Numbers = std::unordered_map<const void*, uint64_t>;
    template <class Array>
    Numbers& numbers() {
        return blocks_[type_of<Array>()];
    }

    // Writes an array's blocks. Returns how far back its root is, or 0 for an empty array. `like` is an array that was
    // written before, or null.
    template <class Array>
    uint64_t array(const Array& array, const Array* like) {
        if (array.empty()) return 0;
        // Go down in the earlier array to a block of the same height.
        auto* model = like ? like->root() : nullptr;
        unsigned height = model ? like->height() : 0;
        for (; model && height > array.height(); --height) model = model->children()[0];
        const uint64_t root = block<Array>(array.root(), array.height(), 0, model, height);
        return numbers<Array>().size() - root;
    }

    // Writes a block and returns its number. `model` is the block at the same position of the earlier array, or null.
    // If its height is less, it covers only the range of the first child.
    template <class Array>
    uint64_t block(typename Array::Block* block, unsigned height, uint64_t position, typename Array::Block* model,
                   unsigned model_height) {
        Numbers& known = numbers<Array>();
        const auto found = known.find(block);
        if (found != known.end()) return found->second;
        const uint8_t op = kBlock + 4 * type_of<Array>();
        const auto* like = model && model_height == height ? model : nullptr;
        // A block of items: all of them, or the changes from the model. Places need their nodes written first.
        if (height == 0) {
            const auto* items = block->items();
            if constexpr (type_of<Array>() == OfPlaces) {
                for (size_t i = 0; i < block->used; ++i) {
                    if (items[i].node()) node(items[i].node());
                }
            }
            if (like) {
                const auto* old = model->items();
                items_like(
                    op + LeavesLike, known.size() - known.at(like), block->used, like->used,
                    [&](size_t i) { return same_item(items[i], old[i]); }, [&](size_t i) { put(items[i]); });
            } else {
                byte(op + Leaves);
                number(position);
                number(block->used);
                for (size_t i = 0; i < block->used; ++i) put(items[i]);
            }
        } else {
            // An inner block: first its children, each with its own model.
            const bool relaxed = block->relaxed;
            uint64_t children[32];
            for (size_t i = 0; i < block->used; ++i) {
                auto* below = like ? (i < like->used ? model->children()[i] : nullptr) : i == 0 ? model : nullptr;
                const uint64_t place = relaxed ? 0 : position * 32 + i;
                children[i] = this->block<Array>(block->children()[i], height - 1, place, below,
                                                 like ? height - 1 : model_height);
            }
            const auto put_child = [&](size_t i) { number(known.size() - children[i]); };
            if (like) {
                items_like(
                    relaxed ? kRelaxedLike : op + InnerLike, known.size() - known.at(like), block->used, like->used,
                    [&](size_t i) { return block->children()[i] == model->children()[i]; }, put_child);
            } else {
                byte(relaxed ? kRelaxed : op + Inner);
                number(height);
                number(position);
                number(block->used);
                for (size_t i = 0; i < block->used; ++i) put_child(i);
            }
        }
        return known.emplace(block, known.size()).first->second;
    }

    // Writes the items that differ from the model's, then those that it doesn't have.
    template <class Same, class Put>
    void items_like(unsigned op, uint64_t back, size_t count, size_t old_count, Same&& same, Put&& put_item) {
        const size_t common = std::min(count, old_count);
        std::vector<size_t> changed;
        for (size_t i = 0; i < common; ++i) {
            if (!same(i)) changed.push_back(i);
        }
        byte(op);
        number(back);
        number(count);
        number(changed.size());
        size_t next = 0;
        for (size_t i : changed) {
            number(i - next);
            put_item(i);
            next = i + 1;
        }
        for (size_t i = common; i < count; ++i) put_item(i);
    }

    // ---- nodes
    // Writes a node, unless it was written before. It may resemble the last one with the same identity.
    void node(const Node* node) {
        if (nodes_.count(node)) return;
        const Node*& last = last_of_[node->birth];
        const auto like = [&](auto* self) { return static_cast<decltype(self)>(last); };
        // The array of the contents comes before the record of the node.
        uint64_t content = 0;
        if (node->kind == Kind::Dict) {
            const auto* dict = static_cast<const DictNode*>(node);
            content = array(dict->entries, last ? &like(dict)->entries : nullptr);
        } else if (node->kind == Kind::List) {
            const auto* list = static_cast<const ListNode*>(node);
            content = array(list->items, last ? &like(list)->items : nullptr);
        } else if (node->kind == Kind::Tuple) {
            const auto* tuple = static_cast<const TupleNode*>(node);
            content = array(tuple->items, last ? &like(tuple)->items : nullptr);
        } else if (node->kind == Kind::Tokens) {
            const auto* tokens = static_cast<const TokensNode*>(node);
            content = array(tokens->tokens, last ? &like(tokens)->tokens : nullptr);
        }
        // The record: its kind, the earlier node, the contents or the object, and the type of a new tuple.
        byte((last ? kNodeLike : kNode) + static_cast<unsigned>(node->kind));
        if (last) number(nodes_.size() - nodes_.at(last));
        if (node->kind == Kind::Opaque) {
            put_leaf(static_cast<const OpaqueNode*>(node)->object);
        } else {
            number(content);
        }
        if (node->kind == Kind::Tuple && !last) {
            Leaf* type = static_cast<const TupleNode*>(node)->type;
            type ? put_leaf(type) : number(IsEmpty);
        }
        last = node;
        nodes_.emplace(node, nodes_.size());
    }

    LeafWriter& leaves_;
    std::string out_;                                 // the archive so far
    uint64_t leaf_count_ = 0;                         // leaves that were written
    Numbers blocks_[4];                               // by ArrayType: block -> number in the archive
    Numbers nodes_;                                   // node -> number in the archive
    std::unordered_map<Epoch, const Node*> last_of_;  // birth -> the last node that was written of that container
    const Heap::Table* last_table_ = nullptr;         // of the last heap
};

}  // namespace

std::string write_archive(const std::vector<const Heap*>& heaps, LeafWriter& leaves) {
    Writer writer(leaves);
    for (const Heap* heap : heaps) writer.add(*heap);
    return writer.take();
}

}  // namespace turnwise::state
