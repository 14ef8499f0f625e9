package match

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"

	"k8s.io/apimachinery/pkg/util/validation"

	configv1beta1 "github.com/towline/towline/api/config/v1beta1"
	"github.com/towline/towline/internal/fleet"
)

// hashLength is how many hex digits tell names apart that would be the same: 40 bits.
const hashLength = 10

// SummaryName returns the name of the ClusterSummary of one profile on m: <profile>-sveltos-<cluster>, with "p--" before it for a
// Profile. Two pairs can get the same name ("a-sveltos-b" on "c", "a" on "b-sveltos-c"): see DistinctSummaryName. Nothing may be read
// back from a name; labels and the owner say what a summary is for.
func SummaryName(profileKind, profile string, m fleet.Member) string {
	name := profile + "-" + strings.ToLower(string(m.Type)) + "-" + m.Name
	if profileKind == configv1beta1.ProfileKind {
		name = "p--" + name
	}
	return shorten(name, validation.DNS1123SubdomainMaxLength)
}

// DistinctSummaryName returns the name of the same ClusterSummary when another pair holds SummaryName.
func DistinctSummaryName(profileKind, profile string, m fleet.Member) string {
	identity := strings.Join([]string{profileKind, profile, string(m.Type), m.Name}, "/")
	name := SummaryName(profileKind, profile, m)
	room := validation.DNS1123SubdomainMaxLength - hashLength - 1
	return name[:min(len(name), room)] + "-" + hash(identity)
}

// LabelValue returns s as the value of a label: shortened, with a hash to keep it distinct, if it is too long for one.
func LabelValue(s string) string { return shorten(s, validation.LabelValueMaxLength) }

func shorten(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return s[:limit-hashLength-1] + "-" + hash(s)
}

func hash(s string) string {
	sum := sha256.Sum256([]byte(s))
	return hex.EncodeToString(sum[:])[:hashLength]
}
