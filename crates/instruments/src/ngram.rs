//! Drafts from a text's own repetitions.

use std::ops::AddAssign;

/// The rule of a draft: the last tokens are looked up in what came before them, newest first, and what followed there is
/// taken to follow here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ngram {
    /// Last tokens that must agree, at least 1.
    pub matched: usize,
    /// Most tokens of a draft.
    pub longest: usize,
}

/// What became of the drafts of some texts. A step is one pass: it verifies a draft and adds one token of the model's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    /// Steps, with or without a draft. `steps + accepted` is the number of tokens.
    pub steps: u64,
    /// Steps that had a draft.
    pub steps_with_draft: u64,
    /// Drafted tokens.
    pub drafted: u64,
    /// Drafted tokens up to the first wrong one of each draft.
    pub accepted: u64,
}

impl DraftCounts {
    /// Share of drafted tokens that were accepted.
    pub fn acceptance(&self) -> Option<f64> {
        ratio(self.accepted, self.drafted)
    }

    /// Tokens accepted in a step, on average over all steps.
    pub fn accepted_a_step(&self) -> Option<f64> {
        ratio(self.accepted, self.steps)
    }
}

fn ratio(a: u64, b: u64) -> Option<f64> {
    (b > 0).then(|| a as f64 / b as f64)
}

impl AddAssign for DraftCounts {
    fn add_assign(&mut self, other: Self) {
        self.steps += other.steps;
        self.steps_with_draft += other.steps_with_draft;
        self.drafted += other.drafted;
        self.accepted += other.accepted;
    }
}

impl Ngram {
    /// The draft after `ids`: a stretch of `ids` itself, empty where its last tokens never came before.
    pub fn draft<'a>(&self, ids: &'a [u32]) -> &'a [u32] {
        let Some(end) = ids.len().checked_sub(self.matched).filter(|_| self.matched > 0) else {
            return &[];
        };
        let (before, last) = (&ids[..ids.len() - 1], &ids[end..]);
        match before.windows(self.matched).rposition(|window| window == last) {
            Some(at) => {
                let follows = &ids[at + self.matched..];
                &follows[..follows.len().min(self.longest)]
            }
            None => &[],
        }
    }

    /// Counts the steps in which `ids` would have come, token by token as it stands, after its first `given` tokens. No draft
    /// reaches beyond the token that the step adds.
    pub fn replay(&self, ids: &[u32], given: usize) -> DraftCounts {
        let mut counts = DraftCounts::default();
        let mut at = given;
        while at < ids.len() {
            let draft = self.draft(&ids[..at]);
            let draft = &draft[..draft.len().min(ids.len() - at - 1)];
            let accepted = draft.iter().zip(&ids[at..]).take_while(|(a, b)| a == b).count();
            counts += DraftCounts {
                steps: 1,
                steps_with_draft: u64::from(!draft.is_empty()),
                drafted: draft.len() as u64,
                accepted: accepted as u64,
            };
            at += accepted + 1;
        }
        counts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAIRS: Ngram = Ngram { matched: 2, longest: 6 };

    #[test]
    fn a_draft_is_what_followed_the_newest_match() {
        for (ids, draft) in [
            (&[][..], &[][..]),
            (&[1], &[]),
            (&[1, 2], &[]),
            (&[1, 1], &[]),
            // The match may overlap the last tokens, but not be them.
            (&[1, 1, 1], &[1]),
            (&[1, 2, 3, 1, 2], &[3, 1, 2]),
            (&[1, 2, 3, 1, 2, 4, 1, 2], &[4, 1, 2]),
            (&[5, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2], &[3, 4, 5, 6, 7, 8]),
            (&[1, 2, 3, 2, 1], &[]),
        ] {
            assert_eq!(PAIRS.draft(ids), draft, "{ids:?}");
        }
        let never = Ngram { matched: 0, longest: 6 };
        assert!(never.draft(&[1, 1, 1]).is_empty());
    }

    #[test]
    fn replays_count_every_step() {
        // 1 2 3 4 | 1 2 come by themselves, then 3 4 1 are right and 2 is wrong (7); 7 and 8 come by themselves.
        let ids = [1, 2, 3, 4, 1, 2, 3, 4, 1, 7, 8];
        assert_eq!(
            PAIRS.replay(&ids, 1),
            DraftCounts {
                steps: 7,
                steps_with_draft: 1,
                drafted: 4,
                accepted: 3,
            }
        );
        let all_given = PAIRS.replay(&ids, ids.len());
        assert_eq!(all_given, DraftCounts::default());
        assert_eq!((all_given.acceptance(), all_given.accepted_a_step()), (None, None));
        // The last step needs no draft for the token that it adds.
        let counts = PAIRS.replay(&[1, 2, 3, 1, 2, 3], 5);
        assert_eq!((counts.steps, counts.drafted), (1, 0));
        let counts = PAIRS.replay(&[1, 2, 3, 1, 2, 3, 1], 5);
        assert_eq!((counts.steps, counts.drafted, counts.accepted), (1, 1, 1));
    }

    #[test]
    fn steps_and_accepted_tokens_make_up_the_text() {
        let ids: Vec<u32> = (0..500u32).map(|i| (i * i / 7) % 5).collect();
        for given in [0, 1, 77, 499] {
            let counts = PAIRS.replay(&ids, given);
            assert_eq!(counts.steps + counts.accepted, (ids.len() - given) as u64);
            assert!(counts.accepted <= counts.drafted && counts.steps_with_draft <= counts.steps);
        }
        let mut sum = PAIRS.replay(&ids, 1);
        assert!(sum.acceptance().unwrap() > 0.0 && sum.accepted_a_step().unwrap() > 0.0);
        let one = sum;
        sum += one;
        assert_eq!((sum.drafted, sum.acceptance()), (2 * one.drafted, one.acceptance()));
    }
}
