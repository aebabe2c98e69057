//! Prompt lookup: a proposer of draft tokens without a model.
//!
//! Editing, quoting and extraction repeat earlier tokens; so the tokens after the last occurrence
//! of a sequence's end are proposed as its draft tokens.  (Saxena, "Prompt lookup decoding", 2023.)
//! Occurrences are found as in LZ77 with hash chains: the newest position of each run of
//! `min_match` tokens, and from each position the one before it (RFC 1951, section 4).
//!
//! Owns the tokens and their positions.  Invariants:
//! 1. `previous[i]` is the newest position before `i` where the run of `min_match` tokens that ends
//!    at `i` ended too, or 0.
//! 2. A match is compared token by token; no match crosses from one sequence into the next.
//!
//! Costs: O(1) per added token and some 16 bytes of memory; a proposal compares
//! at most `max_match` tokens at each of at most `MAX_PLACES` positions.

use std::mem::replace;

use hashbrown::HashTable;

use crate::hash::{PrefixHash, PrefixKey};
use crate::ids::TokenId;

/// Separator of sequences; no token of a vocabulary.
const SEPARATOR: TokenId = -1;
/// Maximum number of positions that a proposal compares, newest first.
const MAX_PLACES: usize = 32;

/// Sequences in which the end of a sequence is looked up.
#[derive(Clone, Debug)]
pub struct TokenLookup {
    min_match: usize,
    max_match: usize,
    max_tokens: usize,
    tokens: Vec<TokenId>,
    /// For each position, the newest one before it where the same run of tokens ended, or 0.
    previous: Vec<u32>,
    /// Newest position of each run of `min_match` tokens, by its hash.
    newest: HashTable<u32>,
}

impl TokenLookup {
    /// Creates an empty lookup.  A match has at least `min_match` tokens (at least 1), of which at
    /// most `max_match` are compared; beyond `max_tokens` tokens the older half is dropped.
    pub fn new(min_match: usize, max_match: usize, max_tokens: usize) -> Self {
        Self {
            min_match: min_match.max(1),
            max_match: max_match.max(min_match),
            max_tokens: max_tokens.clamp(2, u32::MAX as usize / 2),
            tokens: Vec::new(),
            previous: vec![0],
            newest: HashTable::new(),
        }
    }

    /// Number of tokens kept.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether no tokens are kept.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Appends tokens to the newest sequence.
    pub fn extend(&mut self, tokens: &[TokenId]) {
        for token in tokens {
            self.push(*token);
        }
        if self.tokens.len() > self.max_tokens {
            let kept = self.tokens.split_off(self.tokens.len() - self.max_tokens / 2);
            self.tokens.clear();
            self.previous.truncate(1);
            self.newest.clear();
            for token in kept {
                self.push(token);
            }
        }
    }

    /// Ends the newest sequence; later tokens begin another.
    pub fn end_text(&mut self) {
        self.extend(&[SEPARATOR]);
    }

    #[expect(clippy::cast_possible_truncation, reason = "max_tokens is far below")]
    fn push(&mut self, token: TokenId) {
        self.tokens.push(token);
        let (tokens, length) = (&self.tokens, self.min_match);
        let place = tokens.len() as u32;
        let before = last_run(tokens, length).map_or(0, |run| {
            let is_same = |at: &u32| run_at(tokens, length, *at) == run;
            if let Some(newest) = self.newest.find_mut(hash(run), is_same) {
                return replace(newest, place);
            }
            let rehash = |at: &u32| hash(run_at(tokens, length, *at));
            self.newest.insert_unique(hash(run), place, rehash);
            0
        });
        self.previous.push(before);
    }

    /// Returns at most `most` tokens that followed the longest match of the newest sequence's end,
    /// the newest of equals.  The tokens from the match to the end are assumed to repeat.
    pub fn propose(&self, most: usize) -> Vec<TokenId> {
        let newest = self.previous[self.tokens.len()];
        Self::up_to_separator(self.best_match(&self.tokens, newest).iter().cycle(), most)
    }

    /// Returns a proposal for the end of a sequence that was not added.
    pub fn propose_for(&self, text: &[TokenId], most: usize) -> Vec<TokenId> {
        let is_same = |run, at: &u32| run_at(&self.tokens, self.min_match, *at) == run;
        let newest = last_run(text, self.min_match)
            .and_then(|run| self.newest.find(hash(run), |at| is_same(run, at)));
        let newest = newest.copied().unwrap_or(0);
        Self::up_to_separator(self.best_match(text, newest).iter(), most)
    }

    fn up_to_separator<'a>(tokens: impl Iterator<Item = &'a TokenId>, most: usize) -> Vec<TokenId> {
        tokens.copied().take(most).take_while(|token| *token != SEPARATOR).collect()
    }

    /// All tokens after the longest match of the end of `text`, of positions from `newest` on.
    fn best_match(&self, text: &[TokenId], newest: u32) -> &[TokenId] {
        let before = |place: &usize| Some(self.previous[*place] as usize);
        let places = std::iter::successors(Some(newest as usize), before);
        let (mut best, mut longest) = (self.tokens.len(), self.min_match - 1);
        for place in places.take_while(|place| *place > 0).take(MAX_PLACES) {
            let length = self.match_length(text, place);
            if length > longest {
                (best, longest) = (place, length);
            }
            if longest == self.max_match {
                break;
            }
        }
        &self.tokens[best..]
    }

    /// Number of tokens before `place` that match the end of `text`, at most `max_match`.
    fn match_length(&self, text: &[TokenId], place: usize) -> usize {
        let before = self.tokens[..place].iter().rev();
        let pairs = text.iter().rev().zip(before).take(self.max_match);
        pairs.take_while(|(token, other)| token == other && **token != SEPARATOR).count()
    }
}

/// The last `length` tokens, if they belong to one sequence.
fn last_run(tokens: &[TokenId], length: usize) -> Option<&[TokenId]> {
    let first = tokens.len().checked_sub(length)?;
    (!tokens[first..].contains(&SEPARATOR)).then_some(&tokens[first..])
}

fn run_at(tokens: &[TokenId], length: usize, place: u32) -> &[TokenId] {
    &tokens[place as usize - length..place as usize]
}

fn hash(run: &[TokenId]) -> u64 {
    PrefixHash::root(PrefixKey::default()).extend(run).bits()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(tokens: &[TokenId]) -> TokenLookup {
        let mut lookup = TokenLookup::new(2, 8, 1000);
        lookup.extend(tokens);
        lookup
    }

    #[test]
    fn what_followed_the_end_is_proposed() {
        let lookup = of(&[1, 2, 3, 4, 5, 9, 1, 2, 3]);
        assert_eq!(lookup.propose(2), [4, 5]);
        assert_eq!(lookup.propose(9), [4, 5, 9, 1, 2, 3, 4, 5, 9]);
        assert_eq!(of(&[1, 2, 3]).propose(4), []);
        assert_eq!(of(&[1, 2, 3, 2]).propose(4), [], "one token is no match");
        assert_eq!(of(&[]).propose(4), []);
    }

    #[test]
    fn a_repetition_goes_on() {
        assert_eq!(of(&[7, 7, 7]).propose(3), [7, 7, 7]);
        assert_eq!(of(&[1, 2, 1, 2]).propose(5), [1, 2, 1, 2, 1]);
    }

    #[test]
    fn the_longer_match_goes_before_the_newer() {
        let lookup = of(&[1, 2, 3, 40, 0, 2, 3, 50, 1, 2, 3]);
        assert_eq!(lookup.propose(1), [40]);
    }

    #[test]
    fn texts_do_not_run_into_each_other() {
        let mut lookup = of(&[1, 2, 3, 4]);
        lookup.end_text();
        lookup.extend(&[5, 6, 1, 2]);
        lookup.end_text();
        assert_eq!(lookup.propose_for(&[9, 1, 2], 5), [], "the newest match ends its text");
        assert_eq!(lookup.propose_for(&[0, 2, 3], 5), [4]);
        assert_eq!(lookup.propose_for(&[4, 5], 5), [], "no match across an end");
        assert_eq!(lookup.propose(5), []);
    }

    #[test]
    fn the_older_half_is_forgotten() {
        let mut lookup = TokenLookup::new(2, 8, 10);
        lookup.extend(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
        assert_eq!(lookup.propose_for(&[1, 2], 1), [3]);
        lookup.extend(&[11]);
        assert_eq!(lookup.len(), 5);
        assert_eq!(lookup.propose_for(&[1, 2], 1), []);
        assert_eq!(lookup.propose_for(&[8, 9], 1), [10]);
    }

    /// The same proposal by a scan of all tokens.
    fn by_scan(
        tokens: &[TokenId],
        min_match: usize,
        max_match: usize,
        most: usize,
    ) -> Vec<TokenId> {
        let len = tokens.len();
        let length = |place: usize| {
            (0..place.min(max_match))
                .take_while(|i| tokens[place - 1 - i] == tokens[len - 1 - i])
                .count()
        };
        let best =
            (1..len).rev().map(|place| (length(place), place)).filter(|(n, _)| *n >= min_match);
        let Some((_, place)) = best.rev().max_by_key(|(n, place)| (*n, *place)) else {
            return Vec::new();
        };
        (0..most).map(|i| tokens[place + i % (len - place)]).collect()
    }

    proptest! {
        #[test]
        fn the_answer_is_that_of_a_scan(
            tokens in prop::collection::vec(0..3i32, 0..MAX_PLACES),
            (min_match, more, most) in (1..4usize, 0..4usize, 1..12usize),
        ) {
            let mut lookup = TokenLookup::new(min_match, min_match + more, 1000);
            lookup.extend(&tokens);
            prop_assert_eq!(lookup.propose(most), by_scan(&tokens, min_match, min_match + more, most));
        }
    }
}
