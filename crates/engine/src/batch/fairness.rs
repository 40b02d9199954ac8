//! Which rows a pass takes.

/// How prompts and decoding share the passes of a batch.
///
/// Where reads are what a pass costs, its price is the union of its rows' routes, and each further row adds less to it. Were
/// routes uniform ([`expected_experts`]), K3 with 896 experts of which a row takes 16 would read for each layer:
///
/// | rows of the pass | 1 | 8 | 64 | 256 | 512 |
/// |---|---|---|---|---|---|
/// | experts read | 16 | 120 | 613 | 887 | 896 |
/// | experts read for each row | 16 | 15 | 9.6 | 3.5 | 1.7 |
///
/// So one pass of 64 decode rows and 448 prompt rows reads 896 experts a layer; the same rows in two passes read 613 + 896. Real
/// routes are skewed, so unions are smaller still.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fairness {
    /// Every pass takes the next token of every sequence that decodes and fills the rest with prompt tokens, in order of arrival.
    /// Most rows for the bytes read, so the choice for throughput. A token may wait for a full pass: with K3 and
    /// 64 sequences that is up to 1.5 times the bytes of a pass without prompts, with 4 sequences 14 times.
    #[default]
    FullPasses,
    /// The same, but while anything decodes a pass takes at most so many prompt tokens (at least 1), in order of arrival. Bounds
    /// the time between two tokens of a sequence; prompts take more passes, each with nearly the price of a longer one.
    PromptRows(usize),
}

/// What a sequence could give to a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wants {
    /// Its next token.
    Decode,
    /// Tokens of its prompt that have not been fed, at least one.
    Prompt(usize),
}

impl Fairness {
    /// Rows for each sequence of a pass of at most `most` rows; sequences come in order of arrival.
    pub(crate) fn rows(self, wants: &[Wants], most: usize) -> Vec<usize> {
        let decoding = wants.iter().filter(|wants| **wants == Wants::Decode).count();
        let mut prompt_rows = most.saturating_sub(decoding);
        if let (Self::PromptRows(limit), true) = (self, decoding > 0) {
            prompt_rows = prompt_rows.min(limit.max(1));
        }
        let mut decode_rows = most;
        let take = |left: &mut usize, wanted: usize| {
            let rows = wanted.min(*left);
            *left -= rows;
            rows
        };
        wants
            .iter()
            .map(|wants| match wants {
                Wants::Decode => take(&mut decode_rows, 1),
                Wants::Prompt(left) => take(&mut prompt_rows, *left),
            })
            .collect()
    }
}

/// Experts of `experts` that at least one of `rows` rows takes, were each row's `top_k` drawn uniformly: `experts * (1 -
/// (1 - top_k / experts)^rows)`. Skewed routes take fewer.
pub fn expected_experts(experts: usize, top_k: usize, rows: usize) -> f64 {
    let missed = 1.0 - top_k as f64 / experts as f64;
    experts as f64 * (1.0 - missed.powf(rows as f64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use Wants::{Decode, Prompt};

    #[test]
    fn decoding_comes_first_and_prompts_fill_the_pass_in_order() {
        let rows = |wants: &[Wants], most| Fairness::FullPasses.rows(wants, most);
        assert_eq!(rows(&[Prompt(5), Decode, Prompt(9), Decode], 10), [5, 1, 3, 1]);
        assert_eq!(rows(&[Prompt(50), Decode, Prompt(9)], 10), [9, 1, 0]);
        assert_eq!(rows(&[Prompt(3)], 10), [3]);
        assert_eq!(rows(&[Decode, Decode, Prompt(1)], 2), [1, 1, 0]);
        assert_eq!(rows(&[], 2), [0; 0]);
    }

    #[test]
    fn prompts_may_be_limited_while_something_decodes() {
        let rows = |wants: &[Wants], limit| Fairness::PromptRows(limit).rows(wants, 10);
        assert_eq!(rows(&[Prompt(5), Decode, Prompt(9)], 4), [4, 1, 0]);
        assert_eq!(rows(&[Prompt(3), Decode, Prompt(9)], 4), [3, 1, 1]);
        assert_eq!(rows(&[Prompt(3), Decode], 0), [1, 1]);
        assert_eq!(rows(&[Prompt(5), Prompt(9)], 4), [5, 5]);
    }

    #[test]
    fn the_table_is_right() {
        let k3 = |rows| expected_experts(896, 16, rows);
        let table = [(1, 16.0), (8, 120.3), (64, 613.2), (256, 887.1), (512, 895.9)];
        for (rows, experts) in table {
            assert!((k3(rows) - experts).abs() < 0.1, "{rows}: {}", k3(rows));
        }
    }
}
