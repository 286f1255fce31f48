//! The current directory is the whole process's, so this test has a process of its own.

use std::path::Path;
use std::{env, fs};

use libcontainer::container::{Container, ContainerStatus};
use podvisor_agent::container::process::notify::notify;

#[test]
fn a_start_that_fails_leaves_the_current_directory_at_the_root() {
    let base = tempfile::tempdir().unwrap();
    let state = base.path().join("c1");
    fs::create_dir(&state).unwrap();
    let config = r#"{"hooks": null, "cgroup_path": "/podvisor/c1"}"#;
    fs::write(state.join("youki_config.json"), config).unwrap();
    let pid = i32::try_from(std::process::id()).unwrap();
    let created = ContainerStatus::Created;
    let container = Container::new("c1", created, Some(pid), base.path(), &state).unwrap();
    container.save().unwrap();

    // Nobody listens at notify.sock: the process has ended.
    let error = notify(state).unwrap_err();
    assert!(error.to_string().contains("notify"), "{error}");
    assert_eq!(env::current_dir().unwrap(), Path::new("/"));
}
