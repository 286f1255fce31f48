//! Pressure stall information: how long a guest's processes waited for CPUs, memory and disks.
//!
//! The guest reports it by way of its machine's process, so it is not trusted: these types limit
//! shares to 100 %.

use serde::{Deserialize, Serialize};

/// How long processes of a control group waited for each resource; `None` if the guest's kernel
/// does not count it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Psi {
    /// For CPUs, also because of a CPU limit.
    pub cpu: Option<PsiStats>,
    /// For memory, also because of its limits.
    pub memory: Option<PsiStats>,
    /// For disks.
    pub io: Option<PsiStats>,
}

/// How long processes waited for a resource.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsiStats {
    /// While at least one process waited.
    pub some: PsiData,
    /// While all processes that were not idle waited.
    pub full: PsiData,
}

/// How long processes waited, and for which share of the time that has just passed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PsiData {
    /// In microseconds.
    pub total_us: u64,
    /// Of about the last 10 seconds.
    pub avg10: PsiShare,
    /// Of about the last 60 seconds.
    pub avg60: PsiShare,
    /// Of about the last 300 seconds.
    pub avg300: PsiShare,
}

/// A share of time, in hundredths of a percent: 0 to 10,000.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(from = "u32", into = "u32")]
pub struct PsiShare(u16);

impl PsiShare {
    const ALL: u16 = 10_000;

    /// In percent: 0 to 100.
    #[must_use]
    pub fn percent(self) -> f64 {
        f64::from(self.0) / 100.0
    }
}

impl From<u32> for PsiShare {
    /// Limits the share to all of the time.
    fn from(hundredths: u32) -> Self {
        let share = u16::try_from(hundredths).unwrap_or(Self::ALL);
        Self(share.min(Self::ALL))
    }
}

impl From<PsiShare> for u32 {
    fn from(share: PsiShare) -> Self {
        share.0.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_at_most_all_of_the_time_whoever_says_it() {
        for (said, percent) in [(0, 0.0), (1234, 12.34), (10_000, 100.0)] {
            assert!((PsiShare::from(said).percent() - percent).abs() < 1e-9);
        }
        for said in [10_001, 65_535, 65_536, u32::MAX] {
            assert_eq!(PsiShare::from(said), PsiShare::from(10_000));
            let read: PsiShare = serde_json::from_str(&said.to_string()).unwrap();
            assert_eq!(read, PsiShare::from(10_000));
        }
        for text in ["-1", "1.5", "null", "4294967296"] {
            assert!(serde_json::from_str::<PsiShare>(text).is_err(), "{text}");
        }
        let share = PsiShare::from(1234);
        assert_eq!(serde_json::to_string(&share).unwrap(), "1234");
    }
}
