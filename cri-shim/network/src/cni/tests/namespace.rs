//! What plugins leave in a pod's namespace, and what the guest gets of it.

use super::*;

/// A node whose plugin gives a pod `eth0` with this address, and then runs `script`, in which
/// `$in_pod` is ip(8) in the pod's namespace. The other end of `eth0` is there, too: `down`.
fn with_eth0(address: &str, script: &str) -> World {
    let world = World::new(&scripted());
    let script = format!(
        r#"[ $CNI_COMMAND = DEL ] && exit 0
           in_pod="nsenter --net=$CNI_NETNS ip"
           $in_pod link add eth0 type veth peer name down
           $in_pod link set eth0 up
           $in_pod address add {address} dev eth0
           {script}
           echo '{{"cniVersion":"1.0.0","ips":[{{"address":"{address}"}}]}}'"#
    );
    world.script("script", &script);
    world
}

#[test]
fn pods_with_more_interfaces_than_prepared_are_told_and_others_are_prepared_for_them() {
    in_host(async || {
        let world = World::new(&scripted());
        // It brings up all interfaces that it finds: even so, a tap is not treated as an interface.
        world.script(
            "script",
            r#"[ $CNI_COMMAND = DEL ] && exit 0
               in_pod="nsenter --net=$CNI_NETNS"
               $in_pod ip link add eth0 type veth peer name net1
               $in_pod ip link set group default up
               $in_pod ip address add 10.0.0.7/8 dev eth0
               echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/8"}]}'"#,
        );
        for is_as_prepared in [false, false, true] {
            let prepared = world.cni.prepare("pod0").unwrap();
            let early = prepared.taps().unwrap();
            let pod = pod();
            let attached = world.cni.attach(&pod, Capabilities::new(), prepared);
            let attached = attached.await.unwrap();
            assert_eq!(attached.is_as_prepared, is_as_prepared);
            let names: Vec<&str> = attached.nics.iter().map(|nic| nic.name.as_str()).collect();
            assert_eq!(names, ["eth0", "net1"]);
            // The taps from before are used, in their order.
            for (early, nic) in early.iter().zip(&attached.nics) {
                assert_eq!(tap_of(early), tap_of(&nic.tap));
            }
            world.cni.detach("pod0").await.unwrap();
            assert!(world.is_clean());
        }
    });
}

#[test]
fn namespaces_are_where_agents_of_plugins_look_for_them_and_those_of_others_stay() {
    in_host(async || {
        let mut world = World::new(&scripted());
        let public = world.dir.path().join("public");
        let plugin = r#"echo $CNI_NETNS >>$0.netns; [ $CNI_COMMAND = DEL ] && exit 0
               nsenter --net=$CNI_NETNS ip link add eth0 type veth peer name net1
               nsenter --net=$CNI_NETNS ip link set eth0 up
               echo '{"cniVersion":"1.0.0","ips":[{"address":"10.0.0.7/8"}]}'"#;
        world.script("script", plugin);
        // A pod from before.
        world.attach(Capabilities::new()).await.unwrap();
        let old = world.cni.netns("pod0");
        world.cni.options.public_netns_dir = Some(public.clone());
        assert_eq!(world.cni.netns("pod0"), old);
        world.cni.detach("pod0").await.unwrap();
        assert!(!old.exists() && world.is_clean());

        world.attach(Capabilities::new()).await.unwrap();
        let path = public.join("podvisor-pod0");
        assert_eq!(world.cni.netns("pod0"), path);
        for name in ["other", "podvisor"] {
            fs::write(public.join(name), "").unwrap();
        }
        assert_eq!(world.cni.known().unwrap(), ["pod0"]);
        assert!(!world.cni.counters("pod0").unwrap().is_empty());
        world.cni.detach("pod0").await.unwrap();
        assert!(!path.exists() && world.is_clean());
        assert_eq!(fs::read_dir(&public).unwrap().count(), 2);
        let told = world.read("bin/script.netns");
        let expected = [&old, &old, &path, &path].map(|path| path.display().to_string());
        assert_eq!(told.lines().collect::<Vec<_>>(), expected);
    });
}

#[test]
fn routes_keep_their_mtu_metric_and_source_if_it_is_the_guests() {
    in_host(async || {
        let world = with_eth0(
            "10.0.0.7/24",
            r#"$in_pod link set lo up
               $in_pod address add 192.0.2.9/32 dev lo
               $in_pod route add default via 10.0.0.1 mtu 1450
               $in_pod route add default via 10.0.0.2 src 10.0.0.7 metric 200
               $in_pod route add 10.1.0.0/16 via 10.0.0.3 src 192.0.2.9"#,
        );
        let attachment = world.attach(Capabilities::new()).await.unwrap();
        let (_, mut network) = attachment.into_guest();
        network.routes.sort_by_key(|route| route.gateway.clone());
        let attributes = |route: &crate::guest::Route| {
            let text = |number: Option<u32>| number.map(|number| number.to_string());
            [text(route.mtu), text(route.metric), route.source.clone()]
        };
        let some = |text: &str| Some(text.to_owned());
        let attributes: Vec<_> = network.routes.iter().map(attributes).collect();
        let expected = [
            [some("1450"), None, None],
            [None, some("200"), some("10.0.0.7")],
            [None, None, None],
        ];
        assert_eq!(attributes, expected);
        world.cni.detach("pod0").await.unwrap();
    });
}

#[test]
fn neighbours_that_plugins_made_for_good_are_the_guests_and_no_others() {
    in_host(async || {
        let world = with_eth0(
            "10.0.0.7/32",
            r#"for neighbour in "169.254.1.1 nud permanent" "fe80::1 nud permanent" \
                                "169.254.1.2 nud reachable"; do
                   $in_pod neighbour add $neighbour lladdr 02:00:00:00:00:0b dev eth0
               done
               $in_pod neighbour add 169.254.1.3 lladdr 02:00:00:00:00:0b dev down"#,
        );
        let attachment = world.attach(Capabilities::new()).await.unwrap();
        let (_, mut network) = attachment.into_guest();
        network.neighbours.sort_by(|a, b| a.address.cmp(&b.address));
        let expected = ["169.254.1.1", "fe80::1"].map(|address| crate::guest::Neighbour {
            address: address.to_owned(),
            mac: [2, 0, 0, 0, 0, 0x0b],
            interface: "eth0".to_owned(),
        });
        assert_eq!(network.neighbours, expected);
        world.cni.detach("pod0").await.unwrap();
    });
}

#[test]
fn an_interface_without_arp_is_one_for_the_guest_and_others_are_not() {
    in_host(async || {
        let script = r#"$in_pod link set eth0 arp off
                        $in_pod link set dev down up"#;
        let world = with_eth0("10.0.0.7/32", script);
        let attachment = world.attach(Capabilities::new()).await.unwrap();
        let (_, network) = attachment.into_guest();
        let flags = network.interfaces.iter();
        let flags: Vec<_> = flags.map(|it| (it.name.as_str(), it.no_arp)).collect();
        assert_eq!(flags, [("eth0", true), ("down", false)]);
        world.cni.detach("pod0").await.unwrap();
    });
}

/// Returns the name of a tap's interface, which the kernel shows for its file.
fn tap_of(tap: &OwnedFd) -> String {
    let info = fs::read_to_string(format!("/proc/self/fdinfo/{}", tap.as_raw_fd())).unwrap();
    let name = info.lines().find_map(|line| line.strip_prefix("iff:\t"));
    name.unwrap_or_default().to_owned()
}
