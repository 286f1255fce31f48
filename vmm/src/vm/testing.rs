//! What tests of several modules need.

use std::process::Command;

/// Runs `body`, which affects its whole process, in a process of its own: as the test `name`, from
/// which this is called.
pub(super) fn in_own_process(name: &str, body: impl FnOnce()) {
    const CHILD: &str = "PODVISOR_TEST_IN_OWN_PROCESS";
    if std::env::var_os(CHILD).is_some() {
        return body();
    }
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name])
        .env(CHILD, "")
        .output()
        .unwrap();
    // Under another name, no test would run.
    let passed = String::from_utf8_lossy(&child.stdout).contains(" 1 passed");
    assert!(child.status.success() && passed, "{child:?}");
}
