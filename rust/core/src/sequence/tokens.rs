//! The tokens of a sequence: a list, and the newest beside the counters of the sequence.
//!
//! Owns the token ids.  A step adds a token to every decoding sequence.  An append to each list
//! would touch a separate page of memory, and thousands of pages exceed a processor's TLB. So the
//! newest tokens stay beside the counters until [`MAX_NEWEST`] are appended at once.  Invariants:
//! 1. `listed` and then the first `len - listed.len()` of `newest` are the tokens, in order.
//! 2. All tokens are listed whenever they fill their blocks, and after `settle`.
//!
//! Costs: 4 bytes a token and 104 a sequence; one push in [`MAX_NEWEST`] touches the list if that
//! divides the block size, as it does the usual ones.

use std::borrow::Cow;
use std::ops::Range;

use crate::ids::TokenId;

/// Maximum number of tokens kept beside the list, a power of two.  More would make each step read
/// more of a sequence than it needs.
const MAX_NEWEST: usize = 16;

#[derive(Clone, Debug)]
#[repr(C)] // keeps the counters side by side
pub(super) struct Tokens {
    listed: Vec<TokenId>,
    len: usize,
    /// The tokens are listed when their number is a multiple of this, a power of two that divides
    /// the block size.
    interval: usize,
    newest: [TokenId; MAX_NEWEST],
}

impl Tokens {
    pub(super) fn new(prompt: &[TokenId], block_size: usize) -> Self {
        Self {
            listed: prompt.to_vec(),
            len: prompt.len(),
            newest: [0; MAX_NEWEST],
            interval: MAX_NEWEST.min(1 << block_size.trailing_zeros()),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn push(&mut self, token: TokenId) {
        self.newest[self.len - self.listed.len()] = token;
        self.len += 1;
        if self.len & (self.interval - 1) == 0 {
            self.settle();
        }
    }

    /// Appends the newest tokens to the list.
    pub(super) fn settle(&mut self) {
        self.listed.extend_from_slice(&self.newest[..self.len - self.listed.len()]);
    }

    pub(super) fn pop(&mut self) {
        self.len -= 1;
        self.listed.truncate(self.len);
    }

    pub(super) fn last_mut(&mut self) -> Option<&mut TokenId> {
        match self.len - self.listed.len() {
            0 => self.listed.last_mut(),
            num_newest => self.newest.get_mut(num_newest - 1),
        }
    }

    /// The tokens of the list, from the first on.
    pub(super) fn listed(&self) -> &[TokenId] {
        &self.listed
    }

    /// The token at `position`.
    ///
    /// # Panics
    /// If there are fewer tokens.
    pub(super) fn at(&self, position: usize) -> TokenId {
        match position.checked_sub(self.listed.len()) {
            None => self.listed[position],
            Some(place) => self.newest[..self.len - self.listed.len()][place],
        }
    }

    /// The tokens at `positions`; a copy if they are not all in the list or all in `newest`.
    ///
    /// # Panics
    /// If there are fewer tokens.
    pub(super) fn get(&self, positions: Range<usize>) -> Cow<'_, [TokenId]> {
        let num_listed = self.listed.len();
        let newest = &self.newest[..self.len - num_listed];
        if positions.start >= num_listed {
            Cow::Borrowed(&newest[positions.start - num_listed..positions.end - num_listed])
        } else if positions.end <= num_listed {
            Cow::Borrowed(&self.listed[positions])
        } else {
            let newest = &newest[..positions.end - num_listed];
            Cow::Owned([&self.listed[positions.start..], newest].concat())
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The model: one list.
        #[test]
        fn tokens_are_those_of_one_list(
            prompt in prop::collection::vec(0..9, 1..40),
            block_size in 1..40usize,
            steps in prop::collection::vec((0..9u8, 10..99), 0..80),
        ) {
            let (mut tokens, mut list) = (Tokens::new(&prompt, block_size), prompt);
            for (step, token) in steps {
                match step {
                    0 if list.len() > 1 => {
                        tokens.pop();
                        list.pop();
                    }
                    1 => {
                        *tokens.last_mut().unwrap() = token;
                        *list.last_mut().unwrap() = token;
                    }
                    2 => tokens.settle(),
                    _ => {
                        tokens.push(token);
                        list.push(token);
                        let num_full = list.len() / block_size * block_size;
                        prop_assert_eq!(&tokens.listed()[..num_full], &list[..num_full]);
                    }
                }
                prop_assert_eq!(tokens.len(), list.len());
                prop_assert!((0..list.len()).all(|place| tokens.at(place) == list[place]));
                for start in 0..=list.len() {
                    for end in start..=list.len() {
                        prop_assert_eq!(&tokens.get(start..end)[..], &list[start..end]);
                    }
                }
            }
        }
    }
}
