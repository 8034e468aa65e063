// What is computed of each row by itself: norms, activations, sums.
#pragma once

#include "lanes.h"

namespace {

constexpr int64_t MANY_ROWS = 16;  // from here on they are worth waking another thread for: some 30 us of one thread

// x / sqrt(mean(x^2) + eps) in one of these forms, as the model has it.
enum NormForm { ROUNDED, ONE_MORE, UNROUNDED };  // times the weight after rounding; times 1 + the weight; times the weight

// Of each row `count` parts are normed by themselves, one behind the other; rows of x and y begin `stride` numbers apart. y is
// not x, because the last LANES of a part may overlap those before.
struct Norm {
    const void *x, *weight;
    void *y;
    int64_t stride, count, width;
    float eps;
    int form;
};

template <class T>
void norm(const Norm &all, int64_t rows, int threads) {
    const T *weight = (const T *)all.weight;
    int64_t width = all.width;
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t part = 0; part < rows * all.count; part++) {
        int64_t begin = part / all.count * all.stride + part % all.count * width;
        const T *from = (const T *)all.x + begin;
        T *to = (T *)all.y + begin;
        Lanes squares = {};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) squares += load(from + i) * load(from + i);
        Lanes last = load_part(from + i, width - i);
        float scale = 1 / std::sqrt(sum(squares + last * last) / width + all.eps);
        blocks(width, [&](int64_t i) {
            Lanes scaled = load(from + i) * scale, gain = load(weight + i);
            if (all.form == ROUNDED) scaled = rounded<T>(scaled);
            store(scaled * (all.form == ONE_MORE ? 1.0f + gain : gain), to + i);
        });
    }
}

// (x - mean) / sqrt(variance + eps), times the weight, plus the bias, which may be null; y is not x, as above.
struct LayerNorm {
    const void *x, *weight, *bias;
    void *y;
    int64_t width;
    float eps;
};

template <class T>
void layer_norm(const LayerNorm &all, int64_t rows, int threads) {
    const T *weight = (const T *)all.weight, *bias = (const T *)all.bias;
    int64_t width = all.width, whole = width / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = (const T *)all.x + row * width;
        T *to = (T *)all.y + row * width;
        Lanes last = load_part(from + whole, width - whole), total = last, squares;
        for (int64_t i = 0; i < whole; i += LANES) total += load(from + i);
        float mean = sum(total) / width;
        last = between(last - mean, 0, width - whole, 0);
        squares = last * last;
        for (int64_t i = 0; i < whole; i += LANES) squares += (load(from + i) - mean) * (load(from + i) - mean);
        float scale = 1 / std::sqrt(sum(squares) / width + all.eps);
        blocks(width, [&](int64_t i) {
            Lanes scaled = (load(from + i) - mean) * scale;
            if (weight) scaled *= load(weight + i);
            if (bias) scaled += load(bias + i);
            store(scaled, to + i);
        });
    }
}

// x / (1 + e^(-2z)), z = sqrt(2 / pi) (x + 0.044715 x^3): gelu in its approximation by tanh.
inline __attribute__((always_inline)) Lanes gelu_by_tanh(Lanes x) {
    return x / (1.0f + exponential(-1.5957691216f * (1.0f + 0.044715f * x * x) * x));
}

// x times the share of the normal distribution below it; erfc by formula 7.1.26 of Abramowitz and Stegun, to 1.5e-7.
inline __attribute__((always_inline)) Lanes gelu(Lanes x) {
    Lanes z = (x < 0 ? -x : x) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z), power = 1.061405429f * t - 1.453152027f;
    for (float next : {1.421413741f, -0.284496736f, 0.254829592f}) power = power * t + next;
    Lanes beyond = 0.5f * x * (power * t * exponential(-z * z));
    return x > 0 ? x - beyond : beyond;
}

// Activations without a gate.
enum ActivationKind { RELU, SQUARED_RELU, SILU_ALONE, GELU_ALONE, GELU_BY_TANH };
struct Activation {
    const void *x;
    void *y;
    int64_t width, kind;
};

template <class T>
void activate(const Activation &all, int64_t rows, int threads) {
    int64_t width = all.width, kind = all.kind;
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const T *from = (const T *)all.x + row * width;
        T *to = (T *)all.y + row * width;
        blocks(width, [&](int64_t i) {
            Lanes x = load(from + i);
            if (kind == RELU) x = x < 0 ? Lanes{} : x;
            if (kind == SQUARED_RELU) x = x < 0 ? Lanes{} : x * x;
            if (kind == SILU_ALONE) x = x / (1.0f + exponential(-x));
            if (kind == GELU_ALONE) x = gelu(x);
            if (kind == GELU_BY_TANH) x = gelu_by_tanh(x);
            store(x, to + i);
        });
    }
}

// silu(gate) * up, or with gelu in the place of silu; a row of x is the gate's numbers and then the other's. CLAMPED: gate at most
// `limit`, up within it, and gate * sigmoid(slope * gate) * (up + 1).
enum GateKind { SILU, GELU, CLAMPED };
struct Gated {
    const void *x;
    void *y;
    int64_t width, kind;
    float slope, limit;
};

template <class T>
void gated(const Gated &all, int64_t rows, int threads) {
    int64_t width = all.width, kind = all.kind;
    float limit = all.limit;
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        const T *gate = (const T *)all.x + 2 * row * width, *up = gate + width;
        T *to = (T *)all.y + row * width;
        blocks(width, [&](int64_t i) {
            Lanes number = load(gate + i), other = load(up + i);
            if (kind == CLAMPED) {
                number = number > limit ? limit + Lanes{} : number;
                other = other > limit ? limit + Lanes{} : other;
                other = (other < -limit ? -limit - Lanes{} : other) + 1.0f;
            }
            Lanes activated = kind == GELU ? gelu_by_tanh(number) : number / (1.0f + exponential(-all.slope * number));
            store(rounded<T>(activated) * other, to + i);
        });
    }
}

// y = one + other, rows of `width` numbers; y is none of them, because the last LANES of a row may overlap those before.
struct Sum {
    const void *one, *other;
    void *y;
    int64_t width;
};

template <class T>
void add(const Sum &all, int64_t rows, int threads) {
#pragma omp parallel for num_threads(threads) if (rows >= MANY_ROWS)
    for (int64_t row = 0; row < rows; row++) {
        int64_t begin = row * all.width;
        const T *one = (const T *)all.one + begin, *other = (const T *)all.other + begin;
        T *to = (T *)all.y + begin;
        blocks(all.width, [&](int64_t i) { store(load(one + i) + load(other + i), to + i); });
    }
}

}  // namespace
