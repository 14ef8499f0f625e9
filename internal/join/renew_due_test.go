package join

import (
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

func TestRenewalDue(t *testing.T) {
	t.Parallel()
	start := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	lives := func(issued time.Time, life time.Duration) Token {
		return Token{Issued: issued, Expires: issued.Add(life)}
	}
	for name, test := range map[string]struct {
		interval time.Duration
		last     time.Time
		current  Token
		want     time.Duration
	}{
		"ten minutes ahead":                       {interval: time.Hour, last: start.Add(time.Hour), current: lives(start.Add(time.Hour), 5*time.Hour), want: 110 * time.Minute},
		"a short interval":                        {interval: 10 * time.Minute, last: start, current: lives(start, time.Hour), want: 10 * time.Minute},
		"never renewed: from the token's issue":   {interval: time.Hour, current: lives(start.Add(time.Hour), 5*time.Hour), want: 110 * time.Minute},
		"never renewed, and a token without life": {interval: time.Hour, want: 50 * time.Minute},
		"the issuer gives less":                   {interval: 5 * time.Hour, last: start, current: lives(start, time.Hour), want: 48 * time.Minute},
		"an older token was registered again":     {interval: 5 * time.Hour, last: start.Add(50 * time.Minute), current: lives(start, time.Hour), want: 51 * time.Minute},
		"the member's clock is late":              {interval: 5 * time.Hour, last: start.Add(9 * time.Hour), current: lives(start, time.Hour), want: 9*time.Hour + time.Minute},
		"renewed, and a token without life":       {interval: time.Hour, last: start.Add(time.Hour), want: 110 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cluster := &libv1beta1.SveltosCluster{ObjectMeta: metav1.ObjectMeta{CreationTimestamp: metav1.NewTime(start)}}
			cluster.Spec.TokenRequestRenewalOption = &libv1beta1.TokenRequestRenewalOption{RenewTokenRequestInterval: metav1.Duration{Duration: test.interval}}
			if !test.last.IsZero() {
				cluster.Status.LastReconciledTokenRequestAt = test.last.Format(time.RFC3339)
			}
			if got := renewalDue(cluster, test.current).Sub(start); got != test.want {
				t.Errorf("renewalDue() = %s after the start, want %s", got, test.want)
			}
		})
	}
}
