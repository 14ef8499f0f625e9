package identity

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
	"golang.org/x/oauth2"

	libv1beta1 "github.com/towline/towline/api/lib/v1beta1"
)

const (
	// maxMessage limits the bytes of a provider's message, which is written to a status.
	maxMessage = 400
	// maxBody limits the bytes of a response that are read.
	maxBody = 16 << 10
)

// tokenError is the reason why there is no token.
type tokenError struct {
	provider libv1beta1.WorkloadIdentityProvider
	err      error
}

// Error returns one line, because the message is written to the status of a cluster. Libraries return several.
func (e *tokenError) Error() string {
	return fmt.Sprintf("workload identity: get a token from %s: %s", e.provider, describeTokenError(e.err))
}

func (e *tokenError) Unwrap() error { return e.err }

func describeTokenError(err error) string {
	text := err.Error()
	var oauth *oauth2.RetrieveError
	var azure *azidentity.AuthenticationFailedError
	switch {
	case errors.As(err, &oauth) && oauth.Response != nil:
		text = describeResponse(oauth.Response, oauth.Body)
	case errors.As(err, &azure) && azure.RawResponse != nil:
		// A body that cannot be read is ignored.
		body, _ := io.ReadAll(io.LimitReader(azure.RawResponse.Body, maxBody))
		text = describeResponse(azure.RawResponse, body)
	}
	text = strings.Join(strings.Fields(text), " ")
	if len(text) > maxMessage {
		text = strings.ToValidUTF8(text[:maxMessage], "") + "..."
	}
	return text
}

// describeResponse describes the response of a token endpoint. From the body it takes only the error fields of RFC
// 6749, which contain no secrets.
func describeResponse(response *http.Response, body []byte) string {
	var oauthError struct {
		Error       string `json:"error"`
		Description string `json:"error_description"`
	}
	text := response.Status
	if response.Request != nil && response.Request.URL != nil {
		text = response.Request.URL.Host + " answered " + text
	}
	if json.Unmarshal(body, &oauthError) == nil && oauthError.Error != "" {
		text += ": " + oauthError.Error
		if oauthError.Description != "" {
			text += ": " + oauthError.Description
		}
	}
	return text
}
