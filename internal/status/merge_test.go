package status_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
	"github.com/towline/towline/internal/bundle"
	"github.com/towline/towline/internal/status"
)

func TestMergeLocal(t *testing.T) {
	t.Parallel()
	remoteDigest, localDigest := bundle.Digest{1}, bundle.Digest{2}
	delivered := func(digest bundle.Digest, state bundle.State, message string) *status.FeatureResult {
		return &status.FeatureResult{
			Kind: status.Delivered, DesiredDigest: digest, Report: bundle.Report{Digest: digest, State: state, Message: message, Kinds: []string{fmt.Sprint(digest[0])}},
		}
	}
	failed := func(message string) *status.FeatureResult {
		return &status.FeatureResult{Kind: status.Failed, Err: errors.New(message), Status: libv1beta1.FeatureStatusFailed}
	}
	skipped := func(message string) *status.FeatureResult {
		return &status.FeatureResult{Kind: status.Skipped, Err: errors.New(message), Status: libv1beta1.FeatureStatusProvisioning}
	}
	older := delivered(bundle.Digest{4}, bundle.StateFailed, "never")
	older.DesiredDigest = remoteDigest
	withdrawn := &status.FeatureResult{Kind: status.Withdrawn}
	outdated := delivered(localDigest, bundle.StateApplied, "")
	outdated.Report.Digest = bundle.Digest{3}
	const onHub = "on the hub (deploymentType Local): "
	tests := map[string]struct {
		remote, local     *status.FeatureResult
		isRemote, isLocal bool
		want              []string
	}{
		"only the member":                                {delivered(remoteDigest, bundle.StateApplied, ""), nil, true, false, []string{"Delivered 1 1 Applied [1] "}},
		"only the hub":                                   {nil, delivered(localDigest, bundle.StateApplied, ""), false, true, []string{"Delivered 2 2 Applied [2] "}},
		"only the hub, failed":                           {nil, delivered(localDigest, bundle.StateFailed, "no"), false, true, []string{"Delivered 2 2 Failed [2] " + onHub + "no"}},
		"both applied":                                   {delivered(remoteDigest, bundle.StateApplied, ""), delivered(localDigest, bundle.StateApplied, ""), true, true, []string{"Delivered 1 1 Applied [1 2] "}},
		"the member is not done":                         {delivered(remoteDigest, bundle.StateApplying, ""), delivered(localDigest, bundle.StateApplied, ""), true, true, []string{"Delivered 1 1 Applying [1 2] "}},
		"the hub is not done":                            {delivered(remoteDigest, bundle.StateApplied, ""), outdated, true, true, []string{"Delivered 1 1 Pending [1 2] "}},
		"the hub has failed":                             {delivered(remoteDigest, bundle.StateApplied, ""), delivered(localDigest, bundle.StateFailed, "no"), true, true, []string{"Delivered 1 1 Failed [1 2] " + onHub + "no"}},
		"both have failed":                               {delivered(remoteDigest, bundle.StateFailed, "never"), delivered(localDigest, bundle.StateFailed, "no"), true, true, []string{"Delivered 1 1 Failed [1 2] never; " + onHub + "no"}},
		"the hub's is not built":                         {delivered(remoteDigest, bundle.StateApplied, ""), failed("no"), true, true, []string{"Failed " + onHub + "no"}},
		"neither is built":                               {failed("never"), failed("no"), true, true, []string{"Failed never; " + onHub + "no"}},
		"the member's is not built":                      {failed("never"), delivered(localDigest, bundle.StateApplied, ""), true, true, []string{"Failed never"}},
		"the member has failed, the hub's is not built":  {delivered(remoteDigest, bundle.StateFailed, "never"), failed("no"), true, true, []string{"Failed never; " + onHub + "no"}},
		"the member is not done, the hub's is not built": {delivered(remoteDigest, bundle.StateApplying, "waits"), failed("no"), true, true, []string{"Failed " + onHub + "no"}},
		"an older bundle of the member has failed":       {older, failed("no"), true, true, []string{"Failed " + onHub + "no"}},
		"the member has failed, the hub's is skipped":    {delivered(remoteDigest, bundle.StateFailed, "never"), skipped("later"), true, true, []string{"Failed never; " + onHub + "later"}},
		"both keep objects":                              {delivered(remoteDigest, bundle.StateApplied, "kept a"), delivered(localDigest, bundle.StateApplied, "kept b"), true, true, []string{"Delivered 1 1 Applied [1 2] kept a; " + onHub + "kept b"}},
		"withdrawn from the hub":                         {delivered(remoteDigest, bundle.StateApplied, ""), withdrawn, true, false, []string{"Delivered 1 1 Applied [1] "}},
		"withdrawn from the member":                      {withdrawn, delivered(localDigest, bundle.StateApplied, ""), false, true, []string{"Delivered 2 2 Applied [2] "}},
		"withdrawn from both":                            {withdrawn, withdrawn, false, false, []string{"Withdrawn"}},
		"no result for the member":                       {nil, delivered(localDigest, bundle.StateApplied, ""), true, true, nil},
		"no result, the hub has failed":                  {nil, delivered(localDigest, bundle.StateFailed, "no"), true, true, []string{"Failed " + onHub + "no"}},
	}
	for name, tc := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			list := func(r *status.FeatureResult) []status.FeatureResult {
				if r == nil {
					return nil
				}
				return []status.FeatureResult{*r}
			}
			is := func(b bool) func(libv1beta1.FeatureID) bool { return func(libv1beta1.FeatureID) bool { return b } }
			var got []string
			for _, r := range status.MergeLocal(list(tc.remote), list(tc.local), is(tc.isRemote), is(tc.isLocal)) {
				text := string(r.Kind)
				if r.Kind == status.Delivered {
					text += fmt.Sprintf(" %d %d %s %v %s", r.DesiredDigest[0], r.Report.Digest[0], r.Report.State, r.Report.Kinds, r.Report.Message)
				} else if r.Err != nil {
					text += " " + r.Err.Error()
				}
				got = append(got, text)
			}
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("results (-want +got):\n%s", diff)
			}
		})
	}
}
