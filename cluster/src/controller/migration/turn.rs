//! Which of the migrations that wait may begin: a pure function of all of them.
//!
//! All that wait are put in one order, and each takes a place if there is one. Whoever knows the
//! same migrations comes to the same end, so that nothing has to be reserved.

use std::collections::BTreeMap;

use crate::controller::settings::Places;

/// A migration that is not over.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Open {
    /// It takes a place; the others wait for one.
    pub is_under_way: bool,
    /// How many others go first; the highest of those that wait is first.
    pub priority: i32,
    /// When it was made, in seconds.
    pub created: i64,
    /// Its unique id.
    pub uid: String,
    /// The node that it leaves.
    pub node: String,
}

/// Whether the migration with this unique id may begin.
#[must_use]
pub fn may_begin(uid: &str, all: &[Open], places: Places) -> bool {
    let mut of_node: BTreeMap<&str, usize> = BTreeMap::new();
    let mut taken = 0;
    for open in all.iter().filter(|open| open.is_under_way) {
        taken += 1;
        *of_node.entry(&open.node).or_default() += 1;
    }
    let mut waiting: Vec<_> = all.iter().filter(|open| !open.is_under_way).collect();
    waiting.sort_by_key(|open| (-open.priority, open.created, &open.uid));
    for open in waiting {
        let node = of_node.entry(&open.node).or_default();
        let fits = taken < places.cluster && *node < places.node;
        if open.uid == uid {
            return fits;
        }
        if fits {
            taken += 1;
            *node += 1;
        }
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLACES: Places = Places {
        cluster: 3,
        node: 2,
    };

    fn open(uid: &str, node: &str, created: i64, is_under_way: bool) -> Open {
        Open {
            is_under_way,
            priority: 0,
            created,
            uid: uid.to_owned(),
            node: node.to_owned(),
        }
    }

    #[test]
    fn a_node_sends_two_at_a_time_and_does_not_keep_others_from_sending() {
        let all = [
            open("a", "n", 1, true),
            open("b", "n", 2, false),
            open("c", "n", 3, false),
            open("d", "m", 4, false),
            open("e", "m", 5, false),
        ];
        let may = |uid| may_begin(uid, &all, PLACES);
        assert!(may("b"));
        assert!(!may("c"), "the node sends two");
        assert!(may("d"), "another node");
        assert!(!may("e"), "the cluster has three");
        assert!(!may("x"), "nobody knows it");
    }

    #[test]
    fn a_higher_priority_comes_first() {
        let mut urgent = open("z", "n", 9, false);
        urgent.priority = 1;
        let all = [open("a", "n", 1, false), open("b", "n", 2, false), urgent];
        assert!(may_begin("z", &all, PLACES) && may_begin("a", &all, PLACES));
        assert!(!may_begin("b", &all, PLACES));
    }

    #[test]
    fn never_more_begin_than_there_are_places() {
        let nodes = ["a", "b", "c"];
        for seed in 0_u64..500 {
            let mut state = seed;
            let mut random = |below: u64| {
                state = state
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                (state >> 33) % below
            };
            let all: Vec<Open> = (0..8)
                .map(|index| {
                    let node = nodes[usize::try_from(random(3)).unwrap()];
                    open(&format!("{index}"), node, random(3).cast_signed(), false)
                })
                .collect();
            let begin: Vec<_> = all
                .iter()
                .filter(|open| may_begin(&open.uid, &all, PLACES))
                .collect();
            assert!(begin.len() <= PLACES.cluster, "{seed}");
            for node in nodes {
                let of_node = begin.iter().filter(|open| open.node == node).count();
                assert!(of_node <= PLACES.node, "{seed}");
            }
            assert!(!begin.is_empty(), "{seed}");
        }
    }
}
