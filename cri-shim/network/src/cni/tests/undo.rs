//! What is undone of a network, by whom, and what needs no undoing.

use super::*;

#[test]
fn a_network_is_undone_by_what_was_kept_though_its_configuration_is_gone() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let ranges = json!([[{"subnet": "10.88.9.0/24"}]]);
        let world = World::new(&bridge(data.path().to_str().unwrap(), &ranges));
        world.attach(Capabilities::new()).await.unwrap();
        fs::remove_file(world.dir.path().join("net.d/10-test.conflist")).unwrap();
        assert!(world.cni.ready().await.is_err());
        world.cni.detach("pod0").await.unwrap();
        assert!(!command("ip -br link").contains("veth"));
        assert!(world.is_clean());
    });
}

#[test]
fn a_network_is_undone_on_a_disk_that_is_full() {
    in_host(async || {
        let disk = SmallDisk::new();
        let mut world = World::new(&scripted());
        world.cni.options.cache_dir = disk.path().to_owned();
        world.cni = Cni::open(world.cni.options.clone()).unwrap();
        let dir = world.dir.path().display().to_string();
        // Its input at DEL is longer than at ADD.
        let answer = json!({
            "cniVersion": "1.0.0", "ips": [{"address": "10.0.0.7/8"}],
            "routes": vec![json!({"dst": "10.1.0.0/16"}); 300],
        });
        world.script(
            "script",
            &format!(
                r#"cat >{dir}/$CNI_COMMAND
                   [ $CNI_COMMAND = DEL ] && exit 0
                   in_pod="nsenter --net=$CNI_NETNS"
                   $in_pod ip link add eth0 type veth peer name net1
                   $in_pod ip link set eth0 up
                   $in_pod ip address add 10.0.0.7/8 dev eth0
                   echo '{answer}'"#
            ),
        );
        world.attach(Capabilities::new()).await.unwrap();
        disk.fill();
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
        let config: Value = serde_json::from_str(&world.read("DEL")).unwrap();
        let told = config["prevResult"]["routes"].as_array();
        assert_eq!(told.unwrap().len(), 300);
    });
}

/// Attaches the pod in vain; returns the error. Nothing of it may be left.
async fn attach_without_a_trace(world: &World) -> CniError {
    let error = world.attach(Capabilities::new()).await.unwrap_err();
    assert!(world.is_clean(), "{error}");
    assert!(!world.cni.netns("pod0").exists(), "{error}");
    error
}

#[test]
fn what_fails_before_the_first_plugin_runs_needs_no_plugin_to_be_undone() {
    in_host(async || {
        let list = json!({
            "cniVersion": "1.0.0", "name": "test",
            "plugins": [{"type": "first"}, {"type": "second"}],
        });
        let world = World::new(&list);
        let ran = world.dir.path().join("ran");
        let is_missing = |error: CniError, missing: &str| match error {
            CniError::NoPlugin { name, .. } => assert_eq!(name, missing),
            error => panic!("{error}"),
        };
        is_missing(attach_without_a_trace(&world).await, "first");
        world.script("first", &format!("echo $CNI_COMMAND >>{}", ran.display()));
        // Nor has the first one run if only another one is missing.
        is_missing(attach_without_a_trace(&world).await, "second");

        let unusable = |name: &str| {
            let path = world.dir.path().join("bin").join(name);
            let _ = fs::remove_file(&path);
            fs::write(path, "not executable").unwrap();
        };
        unusable("second");
        unusable("first");
        let error = attach_without_a_trace(&world).await;
        assert!(matches!(error, CniError::Execute { .. }), "{error}");
        assert!(!ran.exists());
    });
}

#[test]
fn a_plugin_that_ran_is_undone_though_the_next_one_cannot_be_executed() {
    in_host(async || {
        let list = json!({
            "cniVersion": "1.0.0", "name": "test",
            "plugins": [{"type": "first"}, {"type": "second"}],
        });
        let world = World::new(&list);
        let dir = world.dir.path().display();
        world.script(
            "first",
            &format!("echo $CNI_COMMAND >>{dir}/ran; [ $CNI_COMMAND = DEL ] || echo '{{}}'"),
        );
        fs::write(world.dir.path().join("bin/second"), "not executable").unwrap();
        let error = world.attach(Capabilities::new()).await.unwrap_err();
        assert!(matches!(error, CniError::Execute { .. }), "{error}");
        assert_eq!(world.read("ran"), "ADD\nDEL\n");
        assert_eq!(world.cni.known().unwrap(), ["pod0"]);
        world.script("second", "true");
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
    });
}

#[test]
fn a_disk_too_full_for_the_plugins_input_leaves_nothing_to_undo() {
    in_host(async || {
        let disk = SmallDisk::new();
        let mut world = World::new(&scripted());
        world.cni.options.cache_dir = disk.path().join("cni");
        world.cni = Cni::open(world.cni.options.clone()).unwrap();
        let ran = world.dir.path().join("ran");
        world.script("script", &format!("echo $CNI_COMMAND >>{}", ran.display()));
        disk.fill();
        // Room for the record, but not for the input.
        let filler = File::options().write(true).open(disk.path().join("filler"));
        let filler = filler.unwrap();
        let size = filler.metadata().unwrap().len();
        filler.set_len(size - (8 << 10)).unwrap();
        let CniError::Io { source, .. } = attach_without_a_trace(&world).await else {
            panic!("it is not the disk's error");
        };
        assert_eq!(source.kind(), io::ErrorKind::StorageFull);
        assert!(!ran.exists());
        let left = fs::read_dir(&world.cni.options.cache_dir).unwrap();
        assert_eq!(left.count(), 0);
    });
}

#[test]
fn plugins_run_though_the_directory_of_records_was_removed() {
    in_host(async || {
        let world = World::new(&scripted());
        world.script("script", "[ $CNI_COMMAND = DEL ]");
        fs::remove_dir(world.dir.path().join("cache")).unwrap();
        let error = attach_without_a_trace(&world).await;
        assert!(matches!(error, CniError::Failed { .. }), "{error}");
    });
}

#[tokio::test]
async fn what_a_write_of_a_record_left_goes_with_its_pod() {
    let world = World::new(&scripted());
    let cache = world.dir.path().join("cache");
    fs::write(cache.join("pod7.tmp"), "{").unwrap();
    assert_eq!(world.cni.known().unwrap(), ["pod7"]);
    world.cni.detach("pod7").await.unwrap();
    assert!(world.is_clean());
    assert_eq!(fs::read_dir(cache).unwrap().count(), 0);
}

#[test]
fn a_network_is_undone_whose_namespace_went_with_the_hosts_end() {
    in_host(async || {
        let data = tempfile::tempdir().unwrap();
        let ranges = json!([[{"subnet": "10.88.10.0/24"}]]);
        let world = World::new(&bridge(data.path().to_str().unwrap(), &ranges));
        world.attach(Capabilities::new()).await.unwrap();
        // The namespace's file stays, on a disk.
        let netns = world.cni.netns("pod0");
        unmount(&netns, UnmountFlags::DETACH).unwrap();
        assert!(netns.exists());
        world.cni.detach("pod0").await.unwrap();
        assert!(world.is_clean());
    });
}
