//! Numbers that can be absent, and limits of control groups.

use std::collections::HashMap;

use prost::Message;
use serde::Serialize;

/// A number that can be absent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message, Serialize)]
pub struct Int64Value {
    /// The value.
    #[prost(int64, tag = "1")]
    pub value: i64,
}

/// Limits and weights of a control group. What is 0 or empty is not set, or not changed.
#[derive(Clone, PartialEq, Eq, Message, Serialize)]
pub struct LinuxContainerResources {
    /// The time that `cpu_quota` is for, in microseconds.
    #[prost(int64, tag = "1")]
    pub cpu_period: i64,
    /// CPU time in each period, in microseconds.
    #[prost(int64, tag = "2")]
    pub cpu_quota: i64,
    /// Weight among others, 1024 by default.
    #[prost(int64, tag = "3")]
    pub cpu_shares: i64,
    /// Most memory, in bytes.
    #[prost(int64, tag = "4")]
    pub memory_limit_in_bytes: i64,
    /// How soon it is killed when memory runs out, from -1000 to 1000.
    #[prost(int64, tag = "5")]
    pub oom_score_adj: i64,
    /// CPUs that may be used, such as `0-3,8`.
    #[prost(string, tag = "6")]
    pub cpuset_cpus: String,
    /// Memory nodes that may be used.
    #[prost(string, tag = "7")]
    pub cpuset_mems: String,
    /// Limits by page size.
    #[prost(message, repeated, tag = "8")]
    pub hugepage_limits: Vec<HugepageLimit>,
    /// Further files of its control group (version 2).
    #[prost(map = "string, string", tag = "9")]
    pub unified: HashMap<String, String>,
    /// Most memory and swap together, in bytes.
    #[prost(int64, tag = "10")]
    pub memory_swap_limit_in_bytes: i64,
}

/// How much memory of one page size may be used.
#[derive(Clone, PartialEq, Eq, Hash, Message, Serialize)]
pub struct HugepageLimit {
    /// The page size, such as `2MB`.
    #[prost(string, tag = "1")]
    pub page_size: String,
    /// The limit in bytes.
    #[prost(uint64, tag = "2")]
    pub limit: u64,
}

/// A number without a sign that can be absent.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub struct UInt64Value {
    /// The value.
    #[prost(uint64, tag = "1")]
    pub value: u64,
}
