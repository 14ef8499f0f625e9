package inventory

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/kube"
)

// Members in use have records with these names and fields.
func TestStoredFormatDoesNotChange(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Helm"}
	job := kube.Ref{Group: "batch", Version: "v1", Kind: "Job", Namespace: "web", Name: "j"}
	for name, test := range map[string]struct {
		value any
		want  string
	}{
		"head": {
			Head{
				ID: id, Owner: bundle.Owner{Kind: "ClusterProfile", Name: "web", Tier: 100}, Digest: []byte{1, 2}, State: bundle.StateApplying,
				Message: "m", LastApplied: at, Hub: "hub-uid", Orphan: true, Suspended: true,
				ContentChunks: []string{"c"}, EntryChunks: []string{"i"},
			},
			`{"id":{"requestorKind":"ClusterSummary","requestorName":"eu/web","feature":"Helm"},` +
				`"owner":{"kind":"ClusterProfile","name":"web","tier":100},"options":{},"digest":"AQI=","state":"Applying","message":"m",` +
				`"lastApplied":"2026-01-02T03:04:05Z","hub":"hub-uid","leave":true,"suspended":true,` +
				`"contentChunks":["c"],"inventoryChunks":["i"]}`,
		},
		"release": {
			ReleaseState{
				Namespace: "web", Name: "nginx", Digest: "d", Revision: 3, Operation: Upgrading, Stage: StagePreHooks, Changed: at, FirstDeployed: at,
				Hooks: []HookRun{{
					Event: "pre-upgrade", Ref: job, UID: "u1", Started: at, Completed: at, Phase: "Running", DeleteOnSuccess: true,
				}},
				Attempt: "a", Message: "m", Failures: 1, FailuresAtUninstall: 1, Sensitive: true, PreviousRevision: 2, HadObjectsBefore: true, ObjectsApplied: true,
				Inputs: "i", RenderedRevision: 3, IsUpgrade: true, HelmSecretUID: "u2", HelmSecretFingerprint: "s",
			},
			`{"namespace":"web","name":"nginx","digest":"d","revision":3,"operation":"upgrade","stage":"pre-hooks",` +
				`"changed":"2026-01-02T03:04:05Z","firstDeployed":"2026-01-02T03:04:05Z","hooks":[{"event":"pre-upgrade",` +
				`"ref":{"group":"batch","version":"v1","kind":"Job","namespace":"web","name":"j"},"uid":"u1",` +
				`"started":"2026-01-02T03:04:05Z","completed":"2026-01-02T03:04:05Z","phase":"Running","deleteOnSuccess":true}],` +
				`"attempt":"a","message":"m","failures":1,"recovered":1,"sensitive":true,"former":2,"existed":true,"objectsApplied":true,` +
				`"inputs":"i","renderedRevision":3,"isUpgrade":true,"secretUID":"u2","secretState":"s"}`,
		},
		"entry": {
			Entry{
				Ref: kube.Ref{Version: "v1", Kind: "ConfigMap", Namespace: "web", Name: "c"}, UID: "u", Fingerprint: "f", Adopted: true, Kept: true,
				Origin: "o", Claim: "7", FromHelm: true, IsHelmSecret: true, CompetingOwner: "r",
			},
			`{"ref":{"version":"v1","kind":"ConfigMap","namespace":"web","name":"c"},"uid":"u","fields":"f","adopted":true,"kept":true,` +
				`"origin":"o","claimed":"7","fromHelm":true,"rival":"r"}`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got, err := json.Marshal(test.value)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(got), test.want); diff != "" {
				t.Errorf("stored as (-got +want):\n%s", diff)
			}
		})
	}
}

func TestSecretNamesAndLabelsDoNotChange(t *testing.T) {
	t.Parallel()
	id := bundle.ID{RequestorKind: "ClusterSummary", RequestorName: "eu/web", Feature: "Helm"}
	for name, test := range map[string]struct {
		scope    OwnerScope
		want     string
		labels   map[string]string
		selector string
	}{
		"zero scope": {
			want: "towline-record-vf7b5fdxfigsblslaxhk", labels: map[string]string{"towline.dev/record": "head"},
			selector: "towline.dev/record,!towline.dev/record-scope",
		},
		"hub and registration": {
			scope: OwnerScope{Hub: "hub-uid", Registration: "cluster-uid"}, want: "towline-record-mx7nhmtzuoti4ju6kogr",
			labels: map[string]string{
				"towline.dev/record": "head", "towline.dev/record-hub": "coscbjauaugneutccktm", "towline.dev/record-scope": "k4odguj7uwtttzoqlodn",
			},
			selector: "towline.dev/record,towline.dev/record-scope=k4odguj7uwtttzoqlodn",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := &Store{scope: test.scope}
			if got := s.headName(id); got != test.want {
				t.Errorf("name: got %s, want %s", got, test.want)
			}
			if diff := cmp.Diff(s.labels(keyHead), test.labels); diff != "" {
				t.Errorf("labels (-got +want):\n%s", diff)
			}
			if got := s.selector(labelRecord); got != test.selector {
				t.Errorf("selector: got %s, want %s", got, test.selector)
			}
		})
	}
}
