// Drawing of tokens from logits: the softmax is not stored, and most of the vocabulary is read twice.
#pragma once

#include <limits>

#include "lanes.h"

namespace {

constexpr int64_t BLOCK = 128;  // tokens per partial sum of weights

// One row's logits, LANES at a time; behind the end of the vocabulary they are -inf.
template <class T>
Lanes logits_at(const T *logits, int64_t vocabulary, int64_t i) {
    if (i + LANES <= vocabulary) return load(logits + i);
    return between(load_part(logits + i, vocabulary - i), 0, vocabulary - i, -INFINITY);
}

// Draws one token: the first one whose weights, e^(logit / temperature), and those of the tokens before it come to more than
// `random` of all. With temperature 0 the first of the largest logits, with its log-prob at temperature 1. The log-prob is NaN
// where the row holds NaN or inf.
template <class T>
void draw_row(const T *logits, int64_t vocabulary, double random, float temperature, int64_t &token, float &logprob) {
    Lanes largest = -INFINITY - Lanes{};
    for (int64_t i = 0; i < vocabulary; i += LANES) {
        Lanes some = logits_at(logits, vocabulary, i);
        largest = some > largest || some != some ? some : largest;  // NaN stays, as nothing is larger
    }
    float most = greatest(largest), scale = temperature > 0 ? 1 / temperature : 1;
    auto weights_at = [&](int64_t i) { return exponential((logits_at(logits, vocabulary, i) - most) * scale); };
    thread_local std::vector<double> until;  // of each block, the weights up to its end
    until.clear();
    double total = 0;
    for (int64_t first = 0; first < vocabulary; first += BLOCK) {
        Lanes weights = {};
        for (int64_t i = first; i < std::min(first + BLOCK, vocabulary); i += LANES) weights += weights_at(i);
        until.push_back(total += sum(weights));
    }
    auto one = [&](int64_t i) { return load_part(logits + i, 1)[0]; };
    token = 0;
    if (!std::isfinite(most) || !std::isfinite(total)) {
        logprob = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    if (temperature > 0) {
        // At most just below the total, so that no token of weight 0 is drawn, for any rounding
        double point = std::min(random * total, std::nextafter(total, 0.0));
        int64_t block = std::upper_bound(until.begin(), until.end(), point) - until.begin();
        double before = block > 0 ? until[block - 1] : 0;
        for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, vocabulary); i += LANES) {
            Lanes weights = weights_at(i);
            for (int lane = 0; lane < LANES && before <= point; lane++) {
                if (weights[lane] > 0) token = i + lane;
                before += weights[lane];
            }
            if (before > point) break;
        }
    } else {
        while (greatest(logits_at(logits, vocabulary, token)) != most) token += LANES;
        while (one(token) != most) token++;
    }
    logprob = (one(token) - most) * scale - std::log(total);
}

template <class T>
void draw(
    const T *logits, const double *random, float temperature, int64_t rows, int64_t vocabulary, int64_t *tokens,
    float *logprobs, int threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1)
    for (int64_t row = 0; row < rows; row++)
        draw_row(logits + row * vocabulary, vocabulary, random[row], temperature, tokens[row], logprobs[row]);
}

}  // namespace
