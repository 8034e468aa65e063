// Layers that keep a state (models/recurrent.py), between their products: the gated delta rule and short convolutions.
//
// One new token of many sequences and many tokens of a prompt are the same calculation, token by token, in the order of the
// sequence and in float32: numbers do not depend on what is computed together. A state is read and written once per call, which
// is what one token costs. state_kernels.py compiles this for the processor at hand.

#include "lanes.h"

namespace {

constexpr int64_t MANY_NUMBERS = 1 << 15;  // of states or rows: worth waking another thread for
constexpr int64_t CHANNELS = 8 * LANES;    // of a convolution that are one piece of work
constexpr int MOST_TAPS = 8;               // of a convolution
#define ALL_AT_ONCE _Pragma("GCC unroll 8")  // or sums would not be in registers

}  // namespace

// As state_kernels.py has it. Rows `starts` to `ends` belong to one sequence. One with `known` tokens before them continues the
// states of its slot; else it begins with those of `first_slots`, or with zeros where there are none.
struct Sequences {
    int64_t count, stride;  // of a row, in numbers
    const int64_t *starts, *ends, *slots, *known, *first_slots;
    const void *first_inputs, *rows;
    void *inputs, *output;  // inputs: [slots][taps][channels], the last ones of every convolution
    int threads;
};

struct Convolution {
    int64_t channels, taps;
    const float *weights, *bias;  // [taps][channels], and [channels] or none
};

// A row is queries and keys of all key heads, values, gates, and two numbers per value head: the share of an update, and the step.
struct Delta {
    int64_t key_heads, value_heads, key_dim, value_dim;
    const float *decay, *step_bias, *norm;  // [value_heads], [value_heads], [value_dim]
    const float *first_states;              // as `states`
    float *states, *between;                // [slots][value_heads][key_dim][value_dim]; [rows][channels]
    float eps, share;
};

namespace {

Lanes load_some(const float *from, int64_t count) { return count >= LANES ? load(from) : load_part(from, count); }
Lanes load_some(const bfloat16 *from, int64_t count) { return count >= LANES ? load(from) : load_part(from, count); }

template <class T>
void store_some(Lanes lanes, T *to, int64_t count) {
    if (count >= LANES) return store(lanes, to);
    T part[LANES];
    store(lanes, part);
    std::memcpy((void *)to, part, count * sizeof(T));
}

Lanes sigmoid(Lanes x) { return 1.0f / (1.0f + exponential(-x)); }

// Over LANES channels of a sequence, or fewer: give(row, channel, count, sum) of each token's convolution; its input is
// take(row, channel, count).
template <class T, class Take, class Give>
void convolve(const Sequences &all, const Convolution &kernel, int64_t number, int64_t channel, Take take, Give give) {
    int64_t count = std::min<int64_t>(LANES, kernel.channels - channel), taps = kernel.taps, size = taps * kernel.channels;
    T *kept = (T *)all.inputs + all.slots[number] * size + channel;
    const T *before = kept;
    if (!all.known[number]) before = all.first_inputs ? (const T *)all.first_inputs + all.first_slots[number] * size + channel : nullptr;
    Lanes weights[MOST_TAPS], window[MOST_TAPS], bias = {};
    for (int tap = 0; tap < taps; tap++) {
        weights[tap] = load_some(kernel.weights + tap * kernel.channels + channel, count);
        window[tap] = before ? load_some(before + tap * kernel.channels, count) : Lanes{};
    }
    if (kernel.bias) bias = load_some(kernel.bias + channel, count);
    for (int64_t row = all.starts[number]; row < all.ends[number]; row++) {
        Lanes sum = bias;
        for (int tap = 0; tap + 1 < taps; tap++) window[tap] = window[tap + 1];
        window[taps - 1] = take(row, channel, count);
        for (int tap = 0; tap < taps; tap++) sum += weights[tap] * window[tap];
        give(row, channel, count, sum);
    }
    for (int tap = 0; tap < taps; tap++) store_some(window[tap], kept + tap * kernel.channels, count);
}

template <class T, class Take, class Give>
void convolve_all(const Sequences &all, const Convolution &kernel, int64_t rows, Take take, Give give) {
    int64_t pieces = (kernel.channels + CHANNELS - 1) / CHANNELS, work = all.count * pieces;
#pragma omp parallel for schedule(static) num_threads(all.threads) if (rows * kernel.channels >= MANY_NUMBERS)
    for (int64_t item = 0; item < work; item++) {
        int64_t first = item % pieces * CHANNELS, last = std::min(first + CHANNELS, kernel.channels);
        for (int64_t channel = first; channel < last; channel += LANES)
            convolve<T>(all, kernel, item / pieces, channel, take, give);
    }
}

// y = x / sqrt(sum(x^2) + 1e-6), times a factor.
void unit(const float *x, int64_t width, float factor, float *y) {
    Lanes squares = {};
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes some = load_some(x + i, width - i);
        squares += some * some;
    }
    factor /= std::sqrt(sum(squares) + 1e-6f);
    for (int64_t i = 0; i < width; i++) y[i] = x[i] * factor;
}

// What one token does with a head's state S [key_dim][value_dim], where d is the decay: S = d S + k (share (v - d S'k))', and what
// it reads is S'q.
struct Token {
    const float *query, *key;
    float decay, share, key_query;
};

// WIDE * LANES columns of a state, or fewer in the last LANES where PART.
template <int WIDE, bool PART>
void update_columns(const Token &token, int64_t key_dim, int64_t value_dim, int64_t count, const float *from, float *to, float *value) {
    auto read = [&](const float *at, int block) {
        return PART && block == WIDE - 1 ? load_some(at + block * LANES, count - block * LANES) : load(at + block * LANES);
    };
    auto write = [&](Lanes lanes, float *at, int block) {
        PART && block == WIDE - 1 ? store_some(lanes, at + block * LANES, count - block * LANES) : store(lanes, at + block * LANES);
    };
    Lanes of_key[WIDE] = {}, of_query[WIDE] = {}, change[WIDE];
    if (from)
        for (int64_t i = 0; i < key_dim; i++)
            ALL_AT_ONCE
            for (int block = 0; block < WIDE; block++) {
                Lanes held = read(from + i * value_dim, block);
                of_key[block] += token.key[i] * held;
                of_query[block] += token.query[i] * held;
            }
    ALL_AT_ONCE
    for (int block = 0; block < WIDE; block++) {
        change[block] = (read(value, block) - token.decay * of_key[block]) * token.share;
        write(token.decay * of_query[block] + token.key_query * change[block], value, block);
    }
    for (int64_t i = 0; i < key_dim; i++)
        ALL_AT_ONCE
        for (int block = 0; block < WIDE; block++) {
            Lanes held = from ? read(from + i * value_dim, block) * token.decay : Lanes{};
            write(held + token.key[i] * change[block], to + i * value_dim, block);
        }
}

// All tokens of a sequence in one value head. What they read replaces their values in `between`.
template <class T>
void run_head(const Sequences &all, const Delta &delta, int64_t number, int64_t head) {
    int64_t keys = delta.key_dim, width = delta.value_dim, begin = all.starts[number], tokens = all.ends[number] - begin;
    int64_t of_keys = delta.key_heads * keys, of_values = delta.value_heads * width, channels = 2 * of_keys + of_values;
    int64_t key_head = head * delta.key_heads / delta.value_heads, size = keys * width;
    thread_local std::vector<float> numbers;
    thread_local std::vector<Token> steps;
    numbers.resize(2 * tokens * keys), steps.resize(tokens);
    for (int64_t at = 0; at < tokens; at++) {
        const float *row = delta.between + (begin + at) * channels;
        const T *more = (const T *)all.rows + (begin + at) * all.stride + channels + of_values + head;
        float *query = numbers.data() + 2 * at * keys, *key = query + keys;
        unit(row + key_head * keys, keys, 1 / std::sqrt((float)keys), query);
        unit(row + of_keys + key_head * keys, keys, 1, key);
        float share = load_part(more, 1)[0], step = load_part(more + delta.value_heads, 1)[0] + delta.step_bias[head];
        step = step > 20 ? step : std::log1p(std::exp(step));
        Token &token = steps[at] = {query, key, std::exp(-delta.decay[head] * step), delta.share / (1 + std::exp(-share)), 0};
        for (int64_t i = 0; i < keys; i++) token.key_query += key[i] * query[i];
    }
    float *kept = delta.states + (all.slots[number] * delta.value_heads + head) * size;
    const float *before = kept;
    if (!all.known[number])
        before = delta.first_states ? delta.first_states + (all.first_slots[number] * delta.value_heads + head) * size : nullptr;
    // One token reads a state from memory, in one stream; of more, the columns should stay in the first cache.
    int64_t wide = tokens == 1 ? 8 : 4;
    for (int64_t column = 0, next; column < width; column = next) {
        int64_t left = width - column;
        next = column + (left >= 8 * LANES && wide == 8 ? 8 : left >= 4 * LANES ? 4 : 1) * LANES;
        for (int64_t at = 0; at < tokens; at++) {
            const float *from = at ? kept + column : before ? before + column : nullptr;
            float *to = kept + column, *value = delta.between + (begin + at) * channels + 2 * of_keys + head * width + column;
            switch ((next - column) / LANES) {
                case 8: update_columns<8, false>(steps[at], keys, width, left, from, to, value); break;
                case 4: update_columns<4, false>(steps[at], keys, width, left, from, to, value); break;
                default: update_columns<1, true>(steps[at], keys, width, left, from, to, value);
            }
        }
    }
    // The norm of a head, times its weight and silu(gate)
    for (int64_t at = 0; at < tokens; at++) {
        const float *read = delta.between + (begin + at) * channels + 2 * of_keys + head * width;
        const T *gate = (const T *)all.rows + (begin + at) * all.stride + channels + head * width;
        T *output = (T *)all.output + ((begin + at) * delta.value_heads + head) * width;
        Lanes squares = {};
        for (int64_t i = 0; i < width; i += LANES) {
            Lanes some = load_some(read + i, width - i);
            squares += some * some;
        }
        float scale = 1 / std::sqrt(sum(squares) / width + delta.eps);
        for (int64_t i = 0; i < width; i += LANES) {
            Lanes gates = load_some(gate + i, width - i), weight = load_some(delta.norm + i, width - i);
            store_some(load_some(read + i, width - i) * scale * weight * gates * sigmoid(gates), output + i, width - i);
        }
    }
}

int64_t rows_of(const Sequences &all) {
    int64_t rows = 0;
    for (int64_t number = 0; number < all.count; number++) rows += all.ends[number] - all.starts[number];
    return rows;
}

template <class T>
void delta_rule(const Sequences &all, const Convolution &kernel, const Delta &delta) {
    int64_t rows = rows_of(all), channels = kernel.channels, items = all.count * delta.value_heads;
    convolve_all<T>(
        all, kernel, rows,
        [&](int64_t row, int64_t channel, int64_t count) {
            return load_some((const T *)all.rows + row * all.stride + channel, count);
        },
        [&](int64_t row, int64_t channel, int64_t count, Lanes sum) {
            store_some(sum * sigmoid(sum), delta.between + row * channels + channel, count);
        });
#pragma omp parallel for schedule(dynamic, 1) num_threads(all.threads) if (rows * delta.value_heads * delta.key_dim * delta.value_dim >= MANY_NUMBERS)
    for (int64_t item = 0; item < items; item++) run_head<T>(all, delta, item / delta.value_heads, item % delta.value_heads);
}

// A row is B, C and x; the result is C times the convolution of B x.
template <class T>
void short_convolution(const Sequences &all, const Convolution &kernel) {
    int64_t channels = kernel.channels;
    convolve_all<T>(
        all, kernel, rows_of(all),
        [&](int64_t row, int64_t channel, int64_t count) {
            const T *from = (const T *)all.rows + row * all.stride + channel;
            return rounded<T>(load_some(from, count) * load_some(from + 2 * channels, count));
        },
        [&](int64_t row, int64_t channel, int64_t count, Lanes sum) {
            Lanes factor = load_some((const T *)all.rows + row * all.stride + channels + channel, count);
            store_some(factor * sum, (T *)all.output + row * channels + channel, count);
        });
}

}  // namespace

extern "C" int64_t most_taps() { return MOST_TAPS; }

#define FOR_DTYPE(NAME, T)                                                                                                 \
    extern "C" void delta_rule_##NAME(const Sequences *all, const Convolution *kernel, const Delta *delta) {               \
        delta_rule<T>(*all, *kernel, *delta);                                                                              \
    }                                                                                                                      \
    extern "C" void short_convolution_##NAME(const Sequences *all, const Convolution *kernel) {                            \
        short_convolution<T>(*all, *kernel);                                                                               \
    }

FOR_DTYPE(bfloat16, bfloat16)
FOR_DTYPE(float32, float)
