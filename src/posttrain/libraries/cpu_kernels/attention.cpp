// Attention of a packed row, forward and backward, without score matrices in memory (arXiv:2205.14135; appendix B.2 for the
// gradients): a row of whole sequences, or of prompts and responses that share them.
//
// Keys and values are first laid out as products read them. Then pieces of about equal work, some tokens that follow one prompt
// in one key head each, are computed by whichever thread is free. What they add to the gradients of keys and values is kept apart
// and added up in the order of the pieces, which depend on the row alone, so no bit depends on the number of threads. Sums are in
// float32, factors of products in the dtype. attention.py says what the arguments are.

#include "backward.h"

#include <memory>

namespace {

constexpr int64_t ITEMS = 32;               // pieces times key heads, about, that a row is cut into
constexpr int64_t LEAST_WORK = 1 << 12;     // keys that a piece's tokens see, at least

// Tokens that follow a shared prompt (of 0 tokens: none), side by side in the row.
struct Span {
    int64_t start, tokens, prompt_start, prompt;
};

}  // namespace

// As attention.py has it. Numbers of a head lie side by side; rows of tokens, and heads, are that many numbers apart.
struct Packed {
    int64_t count, heads, kv_heads, dim, window;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;
    const Span *spans;
    const void *query, *key, *value;
    const float *sinks;  // [heads] or null: scores that take a share of the weights and add nothing
    float scaling, softcap;
    void *output;  // [tokens][heads][dim]
    float *lse;    // [tokens][heads]
    const void *grad;
    void *grad_query, *grad_key, *grad_value;  // as the output, and [tokens][kv_heads][dim]
    float *totals;                             // [tokens][heads], sums of weights times their gradients
};

namespace {

// Tokens whose keys are seen, at `place` among all that are laid out; `room` is their number in whole LANES.
struct Holder {
    int64_t start, tokens, room, place;
};

// Some tokens of a span.
struct Part {
    int64_t start, first, last;  // of the span in the row; of the part in the span
    Holder own;
};

struct Piece {
    Holder prompt;  // of no tokens where there is none
    std::vector<Part> parts;
    int64_t sums;  // where its own sums begin, in columns

    int64_t columns() const {
        int64_t found = prompt.room;
        for (const Part &part : parts) found += part.own.room;
        return found;
    }
};

struct Plan {
    std::vector<Holder> holders;
    std::vector<Piece> pieces;
    int64_t room = 0, columns = 0;

    Holder holder(int64_t start, int64_t tokens) {
        for (const Holder &known : holders)
            if (known.start == start) return known;
        int64_t whole = (tokens + LANES - 1) / LANES * LANES;
        holders.push_back({start, tokens, whole, room});
        room += whole;
        return holders.back();
    }

    explicit Plan(const Packed &all) {
        int64_t work = 0;
        for (int64_t i = 0; i < all.count; i++) {
            const Span &span = all.spans[i];
            work += span.tokens * span.prompt + span.tokens * (span.tokens + 1) / 2;
        }
        int64_t most = std::max(LEAST_WORK, work * all.kv_heads / ITEMS), left = 0, before = -1;
        int64_t tile = std::max<int64_t>(1, ROWS_AT_ONCE * all.kv_heads / all.heads);
        for (int64_t i = 0; i < all.count; i++) {
            const Span &span = all.spans[i];
            Holder own = holder(span.start, span.tokens), prompt = {};
            if (span.prompt) prompt = holder(span.prompt_start, span.prompt);
            for (int64_t first = 0, last; first < span.tokens; first = last) {
                if (left <= 0 || before != (span.prompt ? span.prompt_start : -1)) {
                    pieces.push_back({prompt, {}, 0});
                    left = most, before = span.prompt ? span.prompt_start : -1;
                }
                for (last = first; last < span.tokens && left > 0;) {
                    int64_t next = std::min(last + tile, span.tokens);
                    left -= (next - last) * (span.prompt + (last + next) / 2);
                    last = next;
                }
                pieces.back().parts.push_back({span.start, first, last, own});
            }
        }
        for (Piece &piece : pieces) piece.sums = columns, columns += piece.columns();
    }
};

// The keys, as products with queries read them, of some tokens, and the same tokens as products with weights read them.
template <class T>
struct Laid {
    int64_t room, dim;
    std::unique_ptr<T[]> keys, values;

    Laid(int64_t kv_heads, int64_t all_room, int64_t head_dim)
        : room(all_room), dim(head_dim), keys(new T[kv_heads * room * dim]), values(new T[kv_heads * room * dim]) {}

    Tiled<T> tiled(const Holder &holder, int64_t kv_head) const {
        int64_t at = (kv_head * room + holder.place) * dim;
        return {keys.get() + at, values.get() + at, dim, dim, keys.get() + at, values.get() + at};
    }

    // LANES tokens of a holder from `first` on.
    void put(
        const Holder &holder, int64_t kv_head, int64_t first, const T *key, int64_t key_row, const T *value, int64_t value_row) {
        Tiled<T> to = tiled(holder, kv_head);
        int64_t last = std::min(first + LANES, holder.tokens);
        if (last - first < LANES) {
            std::memset((void *)(to.keys + first * dim), 0, LANES * dim * sizeof(T));
            std::memset((void *)(to.values + first * dim), 0, LANES * dim * sizeof(T));
        }
        for (int64_t token = first; token < last; token++) to.put(token, key + token * key_row, value + token * value_row);
    }
};

#ifdef FAST_INT16
// The same as whole numbers.
struct LaidRounded {
    int64_t room, dim;
    RoundedTokens tokens;
    Rounded all;

    LaidRounded(int64_t kv_heads, int64_t all_room, int64_t head_dim)
        : room(all_room), dim(head_dim), all(tokens.of(kv_heads * room, dim, 0)) {}

    Rounded tiled(const Holder &holder, int64_t kv_head) const {
        int64_t at = kv_head * room + holder.place;
        return {all.keys + at * dim, all.values + at * dim, all.key_scales + at, all.value_scales + at, dim, dim, 0};
    }

    template <class T>
    void put(
        const Holder &holder, int64_t kv_head, int64_t first, const T *key, int64_t key_row, const T *value, int64_t value_row) {
        Rounded to = tiled(holder, kv_head);
        const std::vector<T> none(dim);
        auto row = [&](const T *from, int64_t stride, int64_t token) {
            return token < holder.tokens ? from + token * stride : none.data();
        };
        for (int64_t token = first; token < first + LANES; token++) to.put_key(token, row(key, key_row, token));
        to.put_values(first, LANES, [&](int i) { return row(value, value_row, first + i); });
    }
};
#endif

// Calls work(holder, first token, key head) for every LANES tokens of the holders.
template <class Work>
void each_block(const Plan &plan, int64_t kv_heads, int threads, Work work) {
    std::vector<std::pair<const Holder *, int64_t>> blocks;
    for (const Holder &holder : plan.holders)
        for (int64_t first = 0; first < holder.tokens; first += LANES) blocks.emplace_back(&holder, first);
    int64_t count = blocks.size();
#pragma omp parallel for num_threads(threads)
    for (int64_t item = 0; item < count * kv_heads; item++)
        work(*blocks[item / kv_heads].first, blocks[item / kv_heads].second, item % kv_heads);
}

template <class T, class Past>
void forward_piece(const Packed &all, const Piece &piece, const Past &laid, int64_t kv_head) {
    int64_t dim = all.dim, shared = all.heads / all.kv_heads, prompt = piece.prompt.tokens, at = 0, count = 0;
    thread_local Queries<T> queries;
    for (const Part &part : piece.parts) count += (part.last - part.first) * shared;
    queries.begin(count, dim, all.scaling, all.softcap);
    for (const Part &part : piece.parts)
        for (int64_t token = part.first; token < part.last; token++)
            for (int64_t head = 0; head < shared; head++, at++) {
                const T *query = (const T *)all.query + (part.start + token) * all.query_row;
                queries.put(at, query + (kv_head * shared + head) * all.query_head);
                queries.from[at] = all.window > 0 ? std::max<int64_t>(0, prompt + token + 1 - all.window) : 0;
                queries.to[at] = prompt;
            }
    if (prompt) queries.see(0, count, laid.tiled(piece.prompt, kv_head));
    at = 0;
    for (const Part &part : piece.parts) {
        int64_t begin = at;
        for (int64_t token = part.first; token < part.last; token++)
            for (int64_t head = 0; head < shared; head++, at++)
                queries.from[at] = std::max<int64_t>(0, queries.from[at] - prompt), queries.to[at] = token + 1;
        queries.see(begin, at, laid.tiled(part.own, kv_head));
        at = begin;
        for (int64_t token = part.first; token < part.last; token++)
            for (int64_t head = 0; head < shared; head++, at++) {
                int64_t row = (part.start + token) * all.heads + kv_head * shared + head;
                if (all.sinks) queries.sink(at, all.sinks[kv_head * shared + head]);
                queries.give(at, (T *)all.output + row * dim);
                all.lse[row] = queries.log_total(at);
            }
    }
}

template <class T, class Keys>
void forward(const Packed &all, int threads) {
    Plan plan(all);
    Keys laid(all.kv_heads, plan.room, all.dim);
    each_block(plan, all.kv_heads, threads, [&](const Holder &holder, int64_t first, int64_t kv_head) {
        const T *key = (const T *)all.key + holder.start * all.key_row + kv_head * all.key_head;
        const T *value = (const T *)all.value + holder.start * all.value_row + kv_head * all.value_head;
        laid.put(holder, kv_head, first, key, all.key_row, value, all.value_row);
    });
    int64_t pieces = plan.pieces.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t item = 0; item < pieces * all.kv_heads; item++)
        forward_piece<T>(all, plan.pieces[item / all.kv_heads], laid, item % all.kv_heads);
}

// The backward pass of a piece in one key head.
template <class T, class Rows, class Keys>
struct Backward {
    typedef typename Rows::Past Past;

    const Packed &all;
    const Keys &keys, &values;  // keys in both orders; values as products with incoming gradients read them
    int64_t dim = all.dim, shared = all.heads / all.kv_heads, kv_head = 0;
    Rows products{dim};
    // Of TALL queries, [row][column]: weights, their gradients and then those of scores, slopes of the cap. Columns are the prompt's
    // keys and then the part's own.
    std::vector<float> weights, of_weights, slopes;
    std::vector<float> mixed = std::vector<float>(TALL * dim);
    const std::vector<T> none = std::vector<T>(dim);
    int64_t columns = 0;  // of the part at hand

    Backward(const Packed &packed, const Keys &of_keys, const Keys &of_values) : all(packed), keys(of_keys), values(of_values) {}

    // sums: [2][dim][columns of the piece], of keys and values
    void run(const Piece &piece, int64_t head, float *sums) {
        kv_head = head;
        int64_t width = piece.columns(), begin = piece.prompt.room, tile = std::max<int64_t>(1, ROWS_AT_ONCE / shared);
        std::memset(sums, 0, 2 * dim * width * sizeof(float));
        for (const Part &part : piece.parts) {
            columns = piece.prompt.room + part.own.room;
            for (auto *each : {&weights, &of_weights, &slopes}) each->resize(TALL * columns);
            products.begin(columns);
            for (int64_t first = part.first; first < part.last; first += tile)
                tokens(piece, part, first, std::min(first + tile, part.last), sums, width, begin);
            begin += part.own.room;
        }
    }

   private:
    // More heads than ROWS_AT_ONCE share no key in any model that is known; attention.py asks for no more.
    void tokens(const Piece &piece, const Part &part, int64_t first, int64_t last, float *sums, int64_t width, int64_t begin) {
        int64_t rows = (last - first) * shared, groups = (rows + TALL - 1) / TALL;
        for (int64_t row = 0; row < groups * TALL; row += 2) {
            const T *query[2], *grad[2];
            for (int i = 0; i < 2; i++) {
                int64_t token = part.start + first + (row + i) / shared, head = kv_head * shared + (row + i) % shared;
                bool there = row + i < rows;
                query[i] = there ? (const T *)all.query + token * all.query_row + head * all.query_head : none.data();
                grad[i] = there ? (const T *)all.grad + (token * all.heads + head) * dim : none.data();
            }
            products.put(row, query, grad);
        }
        int64_t seen = (last + LANES - 1) / LANES * LANES;  // of the part's own keys
        for (int64_t group = 0; group < groups; group++) of_rows(piece, part, first, rows, group * TALL, seen);
        if (piece.prompt.room) products.across(groups * TALL, 0, piece.prompt.room, sums, width);
        products.across(groups * TALL, piece.prompt.room, seen, sums + begin, width);
    }

    // Weights and gradients of scores of TALL rows from `row` on, and what these make of the gradients of the queries.
    void of_rows(const Piece &piece, const Part &part, int64_t first, int64_t rows, int64_t row, int64_t seen) {
        int64_t prompt = piece.prompt.tokens, room = piece.prompt.room;
        Past own_keys = keys.tiled(part.own, kv_head), own_values = values.tiled(part.own, kv_head);
        Past prompt_keys = keys.tiled(piece.prompt, kv_head), prompt_values = values.tiled(piece.prompt, kv_head);
        products.score(row, prompt_keys, room, weights.data());
        products.score(row, own_keys, seen, weights.data() + room);
        products.score_grads(row, prompt_values, room, of_weights.data());
        products.score_grads(row, own_values, seen, of_weights.data() + room);
        for (int i = 0; i < TALL; i++) {
            int64_t token = first + (row + i) / shared, head = kv_head * shared + (row + i) % shared;
            int64_t at = (part.start + token) * all.heads + head;
            int64_t from = all.window > 0 ? std::max<int64_t>(0, prompt + token + 1 - all.window) : 0;
            bool there = row + i < rows;
            float lse = there ? all.lse[at] : 0;
            Lanes total = {};
            weigh(i, 0, room, from, there ? prompt : 0, lse, total);
            weigh(i, room, seen, std::max<int64_t>(0, from - prompt), there ? token + 1 : 0, lse, total);
            float all_of_row = sum(total);
            if (there) all.totals[at] = all_of_row;
            bend(i, room + seen, all_of_row);
        }
        products.keep(row, room + seen, weights.data(), of_weights.data());
        std::fill(mixed.begin(), mixed.end(), 0.0f);
        products.mix(prompt_keys, 0, room, mixed.data());
        products.mix(own_keys, room, seen, mixed.data());
        for (int64_t i = 0; i < std::min<int64_t>(TALL, rows - row); i++) {
            int64_t token = part.start + first + (row + i) / shared, head = kv_head * shared + (row + i) % shared;
            T *to = (T *)all.grad_query + (token * all.heads + head) * dim;
            for (int64_t k = 0; k < dim; k += LANES) store(load(&mixed[i * dim + k]), to + k);
        }
    }

    // Products become weights, e^(score - lse), from the key `from` up to `to`, and 0 elsewhere; adds to the total of weights
    // times their gradients.
    void weigh(int i, int64_t begin, int64_t count, int64_t from, int64_t to, float lse, Lanes &total) {
        float *weight = weights.data() + i * columns + begin, *slope = slopes.data() + i * columns + begin;
        const float *of_weight = of_weights.data() + i * columns + begin;
        for (int64_t k = 0; k < count; k += LANES) {
            if (k >= to || k + LANES <= from) {
                store(Lanes{}, weight + k), store(Lanes{}, slope + k);
                continue;
            }
            Lanes score = load(weight + k) * all.scaling;
            if (all.softcap > 0) {
                Lanes bent = hyperbolic_tangent(score / all.softcap);
                store(1.0f - bent * bent, slope + k);
                score = bent * all.softcap;
            }
            Lanes found = exponential(score - lse);
            if (k < from || k + LANES > to) found = between(found, from - k, to - k, 0);
            store(found, weight + k);
            total += found * load(of_weight + k);
        }
    }

    // Gradients of weights become those of products.
    void bend(int i, int64_t count, float total) {
        const float *weight = weights.data() + i * columns, *slope = slopes.data() + i * columns;
        float *of_weight = of_weights.data() + i * columns;
        for (int64_t k = 0; k < count; k += LANES) {
            Lanes found = load(weight + k) * (load(of_weight + k) - total) * all.scaling;
            if (all.softcap > 0) found *= load(slope + k);
            store(found, of_weight + k);
        }
    }
};

// Sums of one piece over the keys of a holder: `width` numbers to the next of the dim.
struct Share {
    const float *sums;
    int64_t width;
};

template <class T, class Rows, class Keys>
void backward(const Packed &all, int threads) {
    Plan plan(all);
    int64_t dim = all.dim, kv_heads = all.kv_heads, pieces = plan.pieces.size();
    Keys keys(kv_heads, plan.room, dim), values(kv_heads, plan.room, dim);
    each_block(plan, kv_heads, threads, [&](const Holder &holder, int64_t first, int64_t kv_head) {
        const T *key = (const T *)all.key + holder.start * all.key_row + kv_head * all.key_head;
        const T *value = (const T *)all.value + holder.start * all.value_row + kv_head * all.value_head;
        keys.put(holder, kv_head, first, key, all.key_row, key, all.key_row);
        values.put(holder, kv_head, first, value, all.value_row, value, all.value_row);
    });
    std::unique_ptr<float[]> sums(new float[2 * dim * plan.columns * kv_heads]);
    auto sums_of = [&](const Piece &piece, int64_t kv_head) {
        return sums.get() + 2 * dim * (piece.sums * kv_heads + piece.columns() * kv_head);
    };
#pragma omp parallel num_threads(threads)
    {
        Backward<T, Rows, Keys> work(all, keys, values);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < pieces * kv_heads; item++) {
            const Piece &piece = plan.pieces[item / kv_heads];
            work.run(piece, item % kv_heads, sums_of(piece, item % kv_heads));
        }
    }
    each_block(plan, kv_heads, threads, [&](const Holder &holder, int64_t first, int64_t kv_head) {
        std::vector<Share> shares;
        for (const Piece &piece : plan.pieces) {
            const float *of_piece = sums_of(piece, kv_head);
            int64_t width = piece.columns();
            if (piece.prompt.tokens && piece.prompt.start == holder.start) shares.push_back({of_piece, width});
            of_piece += piece.prompt.room;
            for (const Part &part : piece.parts) {
                if (part.start == holder.start) shares.push_back({of_piece, width});
                of_piece += part.own.room;
            }
        }
        int64_t count = std::min<int64_t>(LANES, holder.tokens - first);
        for (int which = 0; which < 2; which++) {
            T *to = (T *)(which ? all.grad_value : all.grad_key) + ((holder.start + first) * kv_heads + kv_head) * dim;
            for (int64_t i = 0; i < dim; i += LANES) {
                float across[LANES][LANES];
                for (int64_t next = 0; next < LANES; next++) {
                    Lanes total = {};
                    int64_t number = which * dim + i + next;
                    for (const Share &share : shares) total += load(share.sums + number * share.width + first);
                    for (int lane = 0; lane < LANES; lane++) across[lane][next] = total[lane];
                }
                for (int64_t token = 0; token < count; token++) store(load(across[token]), to + token * kv_heads * dim + i);
            }
        }
    });
}

}  // namespace

#define FOR_DTYPE(NAME, T, ROWS, KEYS)                                                                               \
    extern "C" void attention_forward_##NAME(const Packed *all, int threads) { forward<T, KEYS>(*all, threads); } \
    extern "C" void attention_backward_##NAME(const Packed *all, int threads) { backward<T, ROWS, KEYS>(*all, threads); }

#ifdef FAST_INT16
FOR_DTYPE(bfloat16, bfloat16, RoundedRows, LaidRounded)
#else
FOR_DTYPE(bfloat16, bfloat16, FactoredRows<bfloat16>, Laid<bfloat16>)
#endif
FOR_DTYPE(float32, float, FactoredRows<float>, Laid<float>)
