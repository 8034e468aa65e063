// What a pass computes between its matrix products: norms, activations, attention.
//
// The same calculations are in decoder.py and cache.py as torch operations, which serve where this cannot be compiled. Here they
// are one call each instead of ten, and attention reads of every row's keys and values as much as there is, not as much as the
// longest has. All is computed in float32, products of attention in bfloat16 with sums in float32 where the processor has them,
// or by whole numbers (rounded.h); what is stored is rounded once. kernels.py compiles this for the processor at hand and says what
// the arguments are. Every width is at least LANES.

#include "attention.h"
#include "draw.h"
#include "experts.h"
#include "rows.h"

namespace {

// Numbers of keys that queries are multiplied by; from here on attention is worth waking another thread for
constexpr int64_t MANY_FACTORS = 1 << 19;
constexpr int64_t ITEMS = 4;               // pieces of work for every thread, so that all end together
constexpr int64_t TILE = 384;              // queries of a prompt that are computed together

// The position embedding: x cos + (its first `rotated` numbers rolled by half) sin; of the others, cos is 1.
template <class T>
void turn(const T *x, const float *cos, const float *sin, int64_t rotated, int64_t dim, T *rolled, T *y) {
    std::memcpy(rolled, x + rotated / 2, rotated / 2 * sizeof(T));
    std::memcpy(rolled + rotated / 2, x, rotated / 2 * sizeof(T));
    std::memset((void *)(rolled + rotated), 0, (dim - rotated) * sizeof(T));
    blocks(dim, [&](int64_t i) { store(load(x + i) * load(cos + i) + load(rolled + i) * load(sin + i), y + i); });
}

}  // namespace

// As kernels.py has it. Keys and values of prompts are Flat, those of responses Tiled.
struct Attention {
    int64_t heads, kv_heads, dim, rotated, window, prompt_room, response_room, query_key_stride, value_stride;
    const int64_t *order, *prompt_slots, *prompt_lens, *places;
    const void *query_key, *value;
    const float *cos, *sin;
    const void *prompt_keys, *prompt_values;
    void *response_keys, *response_values, *output;
    const float *sinks;  // a score of each head that no key has; may be null
    float scaling, softcap;
    // Prompts' as whole numbers, of all slots, or null
    const void *rounded_keys, *rounded_values;
    const float *key_scales, *value_scales;
};

// Parts of prompts whose keys and values become whole numbers.
struct Rounding {
    int64_t parts, kv_heads, dim, room;
    const int64_t *slots, *firsts, *lasts;
    const void *keys, *values;
    void *rounded_keys, *rounded_values;
    float *key_scales, *value_scales;
};

struct Prefill {
    int64_t pieces, heads, kv_heads, dim, rotated, window, room, query_key_stride, value_stride;
    const int64_t *starts, *ends, *slots, *known;
    void *query_key;
    const void *value;
    const float *cos, *sin;
    void *keys, *values, *output;
    const float *sinks;
    float scaling, softcap;
    int threads;
};

namespace {

#ifdef FAST_INT16
// Of a slot and key head, counted together.
template <class All>
Rounded rounded_prompt(const All &all, int64_t number, int64_t room) {
    int64_t width = (all.dim + 1) / 2 * 2, at = number * room;
    int16_t *keys = (int16_t *)all.rounded_keys + at * width, *values = (int16_t *)all.rounded_values + at * all.dim;
    return {keys, values, (float *)all.key_scales + at, (float *)all.value_scales + at, all.dim, width, 0};
}
#endif

// Attention over a prompt, of a slot and key head that are counted together.
template <class T>
void see_prompt(const Attention &all, Queries<T> &queries, int64_t first, int64_t last, int64_t number) {
#ifdef FAST_INT16
    if constexpr (ROUNDS<T>)
        if (all.rounded_keys) return queries.see(first, last, rounded_prompt(all, number, all.prompt_room));
#endif
    int64_t at = number * all.dim * all.prompt_room;
    const T *keys = (const T *)all.prompt_keys + at, *values = (const T *)all.prompt_values + at;
    queries.see(first, last, Flat<T>{keys, values, all.prompt_room, all.dim});
}

template <class T>
void round_prompts(const Rounding &all, int threads) {
#ifdef FAST_INT16
    if constexpr (ROUNDS<T>) {
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
        for (int64_t item = 0; item < all.parts * all.kv_heads; item++) {
            int64_t part = item / all.kv_heads, number = all.slots[part] * all.kv_heads + item % all.kv_heads;
            int64_t at = number * all.dim * all.room;
            Flat<T> from{(const T *)all.keys + at, (const T *)all.values + at, all.room, all.dim};
            from.round(all.firsts[part], all.lasts[part], rounded_prompt(all, number, all.room));
        }
    }
#endif
}

// For some rows of one prompt, order[first] to order[last], and one key head: turn queries and keys by their positions, store keys
// and values, attend.
template <class T>
void attend_rows(const Attention &all, int64_t first, int64_t last, int64_t kv_head) {
    int64_t dim = all.dim, shared = all.heads / all.kv_heads, count = last - first;
    thread_local Queries<T> queries;
    thread_local std::vector<T> turned, rolled;
    queries.begin(count * shared, dim, all.scaling, all.softcap);
    turned.assign(queries.width, T{}), rolled.resize(dim);
    auto keys_of = [&](int64_t number) {
        int64_t slot = all.order[first + number] * all.kv_heads + kv_head;
        return (T *)all.response_keys + slot * all.response_room * queries.width;
    };
    auto values_of = [&](int64_t number) {
        int64_t slot = all.order[first + number] * all.kv_heads + kv_head;
        return (T *)all.response_values + slot * all.response_room * dim;
    };
    auto own = [&](int64_t number) {
        int64_t next = std::min(number + 1, count - 1);
        return Tiled<T>{keys_of(number), values_of(number), dim, queries.width, keys_of(next), values_of(next)};
    };

    for (int64_t number = 0; number < count; number++) {
        int64_t row = all.order[first + number], place = all.places[row], prompt_len = all.prompt_lens[row];
        const T *query_key = (const T *)all.query_key + row * all.query_key_stride;
        const float *cos = all.cos + row * dim, *sin = all.sin + row * dim;
        for (int64_t head = 0; head < shared; head++) {
            int64_t at = number * shared + head;
            turn(query_key + (kv_head * shared + head) * dim, cos, sin, all.rotated, dim, rolled.data(), turned.data());
            queries.put(at, turned.data());
            queries.from[at] = all.window > 0 ? std::max<int64_t>(0, prompt_len + place + 1 - all.window) : 0;
            queries.to[at] = prompt_len;
        }
        turn(query_key + (all.heads + kv_head) * dim, cos, sin, all.rotated, dim, rolled.data(), turned.data());
        own(number).put(place, turned.data(), (const T *)all.value + row * all.value_stride + kv_head * dim);
    }
    int64_t prompt = all.prompt_slots[all.order[first]] * all.kv_heads + kv_head;
    see_prompt(all, queries, 0, count * shared, prompt);
    for (int64_t number = 0; number < count; number++) {
        int64_t row = all.order[first + number];
        for (int64_t at = number * shared; at < (number + 1) * shared; at++) {
            queries.from[at] = std::max<int64_t>(0, queries.from[at] - all.prompt_lens[row]);
            queries.to[at] = all.places[row] + 1;
        }
        queries.see(number * shared, (number + 1) * shared, own(number));
        T *output = (T *)all.output + (row * all.heads + kv_head * shared) * dim;
        for (int64_t head = 0; head < shared; head++) {
            if (all.sinks) queries.sink(number * shared + head, all.sinks[kv_head * shared + head]);
            queries.give(number * shared + head, output + head * dim);
        }
    }
}

template <class T>
void attend(const Attention &all, int64_t rows, int threads) {
    int64_t tokens = rows;
    for (int64_t row = 0; row < rows; row++) tokens += all.prompt_lens[row] + all.places[row];
    bool many = tokens * all.heads * all.dim >= MANY_FACTORS;
    // Rows of one prompt are one item, unless there are too few of these for the threads.
    int64_t most = many ? std::max<int64_t>(1, rows * all.kv_heads / (ITEMS * threads)) : rows;
    std::vector<std::pair<int64_t, int64_t>> items;
    for (int64_t first = 0, last; first < rows; first = last) {
        int64_t slot = all.prompt_slots[all.order[first]];
        for (last = first; last < rows && last - first < most && all.prompt_slots[all.order[last]] == slot;) last++;
        items.emplace_back(first, last);
    }
    int64_t count = items.size();
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (many)
    for (int64_t item = 0; item < count * all.kv_heads; item++)
        attend_rows<T>(all, items[item / all.kv_heads].first, items[item / all.kv_heads].second, item % all.kv_heads);
}

// LANES tokens of a prompt, or fewer, and one key head: turn their queries, in place, and their keys; store keys and values.
template <class T>
void store_tokens(const Prefill &all, int64_t piece, int64_t first, int64_t last, int64_t kv_head) {
    int64_t dim = all.dim, shared = all.heads / all.kv_heads;
    thread_local std::vector<T> turned, rolled;
    turned.resize(LANES * dim), rolled.resize(dim);
    int64_t slot = (all.slots[piece] * all.kv_heads + kv_head) * dim * all.room;
    int64_t place = all.known[piece] + first - all.starts[piece];
    T *keys = (T *)all.keys + slot + place, *values = (T *)all.values + slot + place * dim;
    for (int64_t row = first; row < last; row++) {
        T *query_key = (T *)all.query_key + row * all.query_key_stride;
        const float *cos = all.cos + row * dim, *sin = all.sin + row * dim;
        for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; head++) {
            turn(query_key + head * dim, cos, sin, all.rotated, dim, rolled.data(), turned.data());
            std::memcpy(query_key + head * dim, turned.data(), dim * sizeof(T));
        }
    }
    for (int64_t row = first; row < last; row++) {
        const T *key = (const T *)all.query_key + row * all.query_key_stride + (all.heads + kv_head) * dim;
        const float *cos = all.cos + row * dim, *sin = all.sin + row * dim;
        turn(key, cos, sin, all.rotated, dim, rolled.data(), turned.data() + (row - first) * dim);
        const T *value = (const T *)all.value + row * all.value_stride + kv_head * dim;
        std::memcpy(values + (row - first) * dim, value, dim * sizeof(T));
    }
    for (int64_t i = 0; i < dim; i++)
        for (int64_t row = 0; row < last - first; row++) keys[i * all.room + row] = turned[row * dim + i];
}

// Attention of some tokens of a prompt, in the heads that share a key head.
template <class T>
void attend_tokens(const Prefill &all, int64_t piece, int64_t first, int64_t last, int64_t kv_head) {
    int64_t dim = all.dim, shared = all.heads / all.kv_heads;
    thread_local Queries<T> queries;
    queries.begin((last - first) * shared, dim, all.scaling, all.softcap);
    int64_t at = 0;
    for (int64_t row = first; row < last; row++) {
        int64_t position = all.known[piece] + row - all.starts[piece];
        for (int64_t head = 0; head < shared; head++, at++) {
            queries.put(at, (const T *)all.query_key + row * all.query_key_stride + (kv_head * shared + head) * dim);
            queries.from[at] = all.window > 0 ? std::max<int64_t>(0, position + 1 - all.window) : 0;
            queries.to[at] = position + 1;
        }
    }
    int64_t slot = (all.slots[piece] * all.kv_heads + kv_head) * dim * all.room;
    queries.see_shared(0, at, Flat<T>{(const T *)all.keys + slot, (const T *)all.values + slot, all.room, dim});
    at = 0;
    for (int64_t row = first; row < last; row++)
        for (int64_t head = kv_head * shared; head < (kv_head + 1) * shared; head++, at++) {
            if (all.sinks) queries.sink(at, all.sinks[head]);
            queries.give(at, (T *)all.output + (row * all.heads + head) * dim);
        }
}

struct Item {
    int64_t piece, first, last;
};

std::vector<Item> cut(const Prefill &all, int64_t size) {
    std::vector<Item> items;
    for (int64_t piece = 0; piece < all.pieces; piece++)
        for (int64_t first = all.starts[piece]; first < all.ends[piece]; first += size)
            items.push_back({piece, first, std::min(first + size, all.ends[piece])});
    return items;
}

template <class T>
void prefill(const Prefill &all) {
    std::vector<Item> stored = cut(all, LANES), tiles = cut(all, std::max<int64_t>(1, TILE * all.kv_heads / all.heads));
    int64_t of_stored = stored.size() * all.kv_heads, of_tiles = tiles.size() * all.kv_heads;
#pragma omp parallel num_threads(all.threads)
    {
#pragma omp for schedule(dynamic, 16)
        for (int64_t item = 0; item < of_stored; item++) {
            const Item &tokens = stored[item / all.kv_heads];
            store_tokens<T>(all, tokens.piece, tokens.first, tokens.last, item % all.kv_heads);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < of_tiles; item++) {  // the longest first
            const Item &tokens = tiles[(of_tiles - 1 - item) / all.kv_heads];
            attend_tokens<T>(all, tokens.piece, tokens.first, tokens.last, item % all.kv_heads);
        }
    }
}

}  // namespace

// NAME's tokens that lie side by side where keys and values are Tiled.
#define FOR_DTYPE(NAME, T)                                                                                             \
    extern "C" int64_t tile_step_##NAME() { return Form<T>::STEP; }                                                    \
    extern "C" int rounds_##NAME() { return ROUNDS<T>; }                                                               \
    extern "C" void round_##NAME(const Rounding *all, int threads) { round_prompts<T>(*all, threads); }                \
    extern "C" void norm_##NAME(const Norm *all, int64_t rows, int threads) { norm<T>(*all, rows, threads); }          \
    extern "C" void layer_norm_##NAME(const LayerNorm *all, int64_t rows, int threads) {                               \
        layer_norm<T>(*all, rows, threads);                                                                            \
    }                                                                                                                  \
    extern "C" void activate_##NAME(const Activation *all, int64_t rows, int threads) {                                \
        activate<T>(*all, rows, threads);                                                                              \
    }                                                                                                                  \
    extern "C" void mix_experts_##NAME(const Experts *all, int64_t rows, int threads) {                                \
        mix_experts<T>(*all, rows, threads);                                                                           \
    }                                                                                                                  \
    extern "C" void gated_##NAME(const Gated *all, int64_t rows, int threads) { gated<T>(*all, rows, threads); }       \
    extern "C" void add_##NAME(const Sum *all, int64_t rows, int threads) { add<T>(*all, rows, threads); }             \
    extern "C" void draw_##NAME(                                                                                       \
        const T *logits, const double *random, float temperature, int64_t rows, int64_t vocabulary, int64_t *tokens,   \
        float *logprobs, int threads) {                                                                                \
        draw(logits, random, temperature, rows, vocabulary, tokens, logprobs, threads);                                \
    }                                                                                                                  \
    extern "C" void attend_##NAME(const Attention *all, int64_t rows, int threads) { attend<T>(*all, rows, threads); } \
    extern "C" void prefill_##NAME(const Prefill *all) { prefill<T>(*all); }

FOR_DTYPE(bfloat16, bfloat16)
FOR_DTYPE(float32, float)

// Everything that a pass computes, for `rows` rows, one after the other (listed_step.py).
struct Call {
    void (*function)(const void *arguments, int64_t rows, int threads);
    const void *arguments;
};

extern "C" void run_calls(const Call *calls, int64_t count, int64_t rows, int threads) {
    for (int64_t call = 0; call < count; call++) calls[call].function(calls[call].arguments, rows, threads);
}
