// What a decode pass computes between its matrix products, with one new token per row: norms, activations, attention.
//
// The same calculations are in decoder.py and cache.py as torch operations, which serve where this cannot be compiled. Here they
// are one call each instead of ten, and attention reads of every row's keys and values as much as there is, not as much as the
// longest has. All is computed in float32; what is stored is rounded once. kernels.py compiles this for the processor at hand
// and says what the arguments are. Every width is a multiple of LANES.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

constexpr int LANES = 16;
constexpr int BLOCKS = 4;  // of LANES that are computed side by side: they and four heads fit into the registers of AVX-512
// From here on a norm or an activation, and attention, are worth waking another thread for: some 30 us of one thread.
constexpr int64_t MANY_ROWS = 16;
constexpr int64_t MANY_FACTORS = 1 << 19;  // numbers of keys that queries are multiplied by

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

Lanes load(const float *from) {
    Lanes lanes;
    std::memcpy(&lanes, from, sizeof lanes);
    return lanes;
}

Lanes load(const bfloat16 *from) {
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Lanes)(__builtin_convertvector(halves, Words) << 16);
}

void store(Lanes lanes, float *to) { std::memcpy(to, &lanes, sizeof lanes); }

// To the nearest, to the even one of two; NaN stays NaN.
void store(Lanes lanes, bfloat16 *to) {
    Words words = (Words)lanes;
    words = (lanes != lanes) ? words | 0x400000 : words + 0x7fff + (words >> 16 & 1);
    Halves halves = __builtin_convertvector(words >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

template <class T>
Lanes rounded(Lanes lanes) {
    T stored[LANES];
    store(lanes, stored);
    return load(stored);
}

float sum(Lanes lanes) {
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; lane++) lanes[lane] += lanes[lane + half];
    return lanes[0];
}

// e^x to float32's precision, 0 below -87. x = whole ln 2 + rest, and e^rest by the polynomial of Cephes' expf. Adding MAGIC
// leaves the whole number in the last bits of the sum, from where it is added to the exponent of the result.
Lanes exponential(Lanes x) {
    constexpr float LOWEST = -87, HIGHEST = 88, MAGIC = 12582912;
    Lanes high = HIGHEST - Lanes{};
    Lanes bounded = x > HIGHEST ? high : x;
    Lanes shifted = bounded * 1.44269504f + MAGIC, whole = shifted - MAGIC;
    Lanes rest = bounded - whole * 0.693359375f + whole * 2.12194440e-4f;
    Lanes power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    for (float next : {8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f}) power = power * rest + next;
    power = power * rest * rest + rest + 1.0f;
    Lanes result = (Lanes)((Words)power + ((Words)shifted << 23));
    return x < LOWEST ? Lanes{} : result;
}

// x / sqrt(mean(x^2) + eps) times the weight, after rounding, or times 1 + the weight, before.
template <class T>
void norm(const T *x, const T *weight, float eps, bool one_more, int64_t rows, int64_t width, T *y, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = x + row * width;
        Lanes squares = {};
        for (int64_t i = 0; i < width; i += LANES) squares += load(from + i) * load(from + i);
        float scale = 1 / std::sqrt(sum(squares) / width + eps);
        for (int64_t i = 0; i < width; i += LANES) {
            Lanes scaled = load(from + i) * scale, gain = load(weight + i);
            store(one_more ? scaled * (1.0f + gain) : rounded<T>(scaled) * gain, y + row * width + i);
        }
    }
}

// silu(gate) * up; a row of x is the gate's numbers and then the other's.
template <class T>
void swiglu(const T *x, int64_t rows, int64_t width, T *y, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = x + 2 * row * width, *up = gate + width;
        for (int64_t i = 0; i < width; i += LANES) {
            Lanes number = load(gate + i);
            store(rounded<T>(number / (1.0f + exponential(-number))) * load(up + i), y + row * width + i);
        }
    }
}

// Keys [head_dim][room] and values [room][head_dim] of the first `length` tokens, of which those before `start` are not seen.
template <class T>
struct Part {
    const T *keys, *values;
    int64_t room, length, start;

    int64_t width() const { return (length + LANES - 1) / LANES * LANES; }
};

// HEADS queries [HEADS][dim] times WIDE * LANES keys from the `first` on; what is behind a part's length comes along.
template <class T, int HEADS, int WIDE>
void score(const float *query, const Part<T> &part, int64_t first, int64_t dim, float scaling, float *scores, int64_t width) {
    Lanes found[HEADS][WIDE] = {};
    for (int64_t d = 0; d < dim; d++) {
        Lanes keys[WIDE];
        for (int block = 0; block < WIDE; block++) keys[block] = load(part.keys + d * part.room + first + block * LANES);
        for (int head = 0; head < HEADS; head++)
            for (int block = 0; block < WIDE; block++) found[head][block] += query[head * dim + d] * keys[block];
    }
    for (int head = 0; head < HEADS; head++)
        for (int block = 0; block < WIDE; block++)
            store(found[head][block] * scaling, scores + head * width + first + block * LANES);
}

// scores[head][token]; -infinity where a token is not seen
template <class T, int HEADS>
void scores_of(const float *query, const Part<T> &part, int64_t dim, float scaling, float *scores, int64_t width) {
    int64_t first = 0;
    for (; first + BLOCKS * LANES <= part.width(); first += BLOCKS * LANES)
        score<T, HEADS, BLOCKS>(query, part, first, dim, scaling, scores, width);
    for (; first < part.width(); first += LANES) score<T, HEADS, 1>(query, part, first, dim, scaling, scores, width);
    for (int head = 0; head < HEADS; head++) {
        float *of_head = scores + head * width;
        std::fill(of_head, of_head + std::min(part.start, part.length), -INFINITY);
        std::fill(of_head + part.length, of_head + part.width(), -INFINITY);
    }
}

// In place, but for the division by the sum of the weights, which is returned.
float weights_of(float *scores, int64_t width) {
    Lanes largest = load(scores);
    for (int64_t i = LANES; i < width; i += LANES) {
        Lanes more = load(scores + i);
        largest = more > largest ? more : largest;
    }
    float most = largest[0];
    for (int lane = 1; lane < LANES; lane++) most = std::max(most, largest[lane]);
    Lanes total = {};
    for (int64_t i = 0; i < width; i += LANES) {
        Lanes weights = exponential(load(scores + i) - most);
        total += weights;
        store(weights, scores + i);
    }
    return sum(total);
}

// WIDE * LANES numbers of the output, from the `first` on, of every head.
template <class T, int HEADS, int WIDE>
void mix(const float *weights, int64_t width, const Part<T> (&parts)[2], const float *totals, int64_t dim, int64_t first,
         T *output) {
    Lanes mixed[HEADS][WIDE] = {};
    for (const Part<T> &part : parts) {
        for (int64_t token = 0; token < part.length; token++) {
            Lanes values[WIDE];
            for (int block = 0; block < WIDE; block++) values[block] = load(part.values + token * dim + first + block * LANES);
            for (int head = 0; head < HEADS; head++)
                for (int block = 0; block < WIDE; block++) mixed[head][block] += weights[head * width + token] * values[block];
        }
        weights += part.width();
    }
    for (int head = 0; head < HEADS; head++)
        for (int block = 0; block < WIDE; block++)
            store(mixed[head][block] / totals[head], output + head * dim + first + block * LANES);
}

// Attention of HEADS queries, which share a key head, over both parts.
template <class T, int HEADS>
void attend_heads(const float *query, const Part<T> (&parts)[2], int64_t dim, float scaling, float *scores, T *output) {
    int64_t width = parts[0].width() + parts[1].width();
    scores_of<T, HEADS>(query, parts[0], dim, scaling, scores, width);
    scores_of<T, HEADS>(query, parts[1], dim, scaling, scores + parts[0].width(), width);
    float totals[HEADS];
    for (int head = 0; head < HEADS; head++) totals[head] = weights_of(scores + head * width, width);
    int64_t first = 0;
    for (; first + BLOCKS * LANES <= dim; first += BLOCKS * LANES)
        mix<T, HEADS, BLOCKS>(scores, width, parts, totals, dim, first, output);
    for (; first < dim; first += LANES) mix<T, HEADS, 1>(scores, width, parts, totals, dim, first, output);
}

// The position embedding: x cos + (x rolled by half) sin.
template <class T>
void turn(const T *x, const T *cos, const T *sin, int64_t dim, T *rolled, T *y) {
    std::memcpy(rolled, x + dim / 2, dim / 2 * sizeof(T));
    std::memcpy(rolled + dim / 2, x, dim / 2 * sizeof(T));
    for (int64_t i = 0; i < dim; i += LANES)
        store(load(x + i) * load(cos + i) + load(rolled + i) * load(sin + i), y + i);
}

}  // namespace

// As kernels.py has it.
struct Attention {
    int64_t rows, heads, kv_heads, dim, window, prompt_room, response_room, query_key_stride, value_stride;
    const int64_t *prompt_slots, *prompt_lens, *places;
    const void *query_key, *value, *cos, *sin, *prompt_keys, *prompt_values;
    void *response_keys, *response_values, *output;
    float scaling;
    int threads;
};

namespace {

// For one row and one key head: turn the queries and the key by their position, store key and value, attend.
template <class T>
void attend_row(const Attention &all, int64_t row, int64_t kv_head) {
    int64_t dim = all.dim, shared = all.heads / all.kv_heads, place = all.places[row], prompt_len = all.prompt_lens[row];
    int64_t slot = row * all.kv_heads + kv_head, prompt_slot = all.prompt_slots[row] * all.kv_heads + kv_head;
    T *keys = (T *)all.response_keys + slot * dim * all.response_room;
    T *values = (T *)all.response_values + slot * dim * all.response_room;
    int64_t start = all.window > 0 ? std::max<int64_t>(0, prompt_len + place + 1 - all.window) : 0;
    const Part<T> parts[2] = {
        {(const T *)all.prompt_keys + prompt_slot * dim * all.prompt_room,
         (const T *)all.prompt_values + prompt_slot * dim * all.prompt_room, all.prompt_room, prompt_len, start},
        {keys, values, all.response_room, place + 1, std::max<int64_t>(0, start - prompt_len)},
    };
    thread_local std::vector<T> turned;
    thread_local std::vector<float> queries, scores;
    turned.resize(2 * dim);
    queries.resize(shared * dim);
    scores.resize(4 * (parts[0].width() + parts[1].width()));

    const T *query_key = (const T *)all.query_key + row * all.query_key_stride;
    const T *cos = (const T *)all.cos + row * dim, *sin = (const T *)all.sin + row * dim;
    for (int64_t head = 0; head < shared; head++) {
        turn(query_key + (kv_head * shared + head) * dim, cos, sin, dim, turned.data() + dim, turned.data());
        for (int64_t i = 0; i < dim; i += LANES) store(load(turned.data() + i), queries.data() + head * dim + i);
    }
    turn(query_key + (all.heads + kv_head) * dim, cos, sin, dim, turned.data() + dim, turned.data());
    for (int64_t i = 0; i < dim; i++) keys[i * all.response_room + place] = turned[i];
    std::memcpy(values + place * dim, (const T *)all.value + row * all.value_stride + kv_head * dim, dim * sizeof(T));

    T *output = (T *)all.output + (row * all.heads + kv_head * shared) * dim;
    for (int64_t head = 0; head < shared; head += 4) {
        const float *query = queries.data() + head * dim;
        T *of_heads = output + head * dim;
        switch (std::min<int64_t>(4, shared - head)) {
            case 4: attend_heads<T, 4>(query, parts, dim, all.scaling, scores.data(), of_heads); break;
            case 3: attend_heads<T, 3>(query, parts, dim, all.scaling, scores.data(), of_heads); break;
            case 2: attend_heads<T, 2>(query, parts, dim, all.scaling, scores.data(), of_heads); break;
            case 1: attend_heads<T, 1>(query, parts, dim, all.scaling, scores.data(), of_heads); break;
        }
    }
}

template <class T>
void attend(const Attention &all) {
    int64_t tokens = all.rows;
    for (int64_t row = 0; row < all.rows; row++) tokens += all.prompt_lens[row] + all.places[row];
#pragma omp parallel for schedule(static, 1) num_threads(all.threads) if (tokens * all.heads * all.dim >= MANY_FACTORS)
    for (int64_t item = 0; item < all.rows * all.kv_heads; item++)
        attend_row<T>(all, item / all.kv_heads, item % all.kv_heads);
}

}  // namespace

#define FOR_DTYPE(NAME, T)                                                                                                   \
    extern "C" void norm_##NAME(                                                                                             \
        const T *x, const T *weight, float eps, bool one_more, int64_t rows, int64_t width, T *y, int threads) {             \
        norm(x, weight, eps, one_more, rows, width, y, threads);                                                             \
    }                                                                                                                        \
    extern "C" void swiglu_##NAME(const T *x, int64_t rows, int64_t width, T *y, int threads) {                              \
        swiglu(x, rows, width, y, threads);                                                                                  \
    }                                                                                                                        \
    extern "C" void attend_##NAME(const Attention *all) { attend<T>(*all); }

FOR_DTYPE(bfloat16, bfloat16)
FOR_DTYPE(float32, float)
